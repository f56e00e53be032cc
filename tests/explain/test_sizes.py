"""The size that was refused is solved where a text names the model, its rows or its length."""

import json
from pathlib import Path

import pytest

from tests.explain.stated import explained
from trainer_plugins.explain.text.models import find_model

CONFIGS = Path(__file__).parents[1] / "planner" / "configs"
LOSS = """  File "/v/site-packages/transformers/loss/loss_utils.py", line 36, in ForCausalLMLoss
    logits = logits.float()
"""
MLP = """  File "/v/site-packages/transformers/models/qwen2/modeling_qwen2.py", line 46, in forward
    down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
"""
SCORES = """  File "/v/site-packages/transformers/models/llama/modeling_llama.py", line 200, in eager_attention
    attn_weights = torch.matmul(query, key_states.transpose(2, 3)) * scaling
"""
STATES = """  File "/v/site-packages/torch/optim/adamw.py", line 150, in _init_group
    state["exp_avg"] = torch.zeros_like(
"""
BUCKETS = """  File "/v/site-packages/torch/nn/parallel/distributed.py", line 1200, in _ddp_init_helper
    self.reducer = dist.Reducer(
"""


def of(asked: str, frames: str, said: str = "") -> str:
    return (
        f"{said}\n{frames}torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {asked}. GPU 0"
        " has a total capacity of 79.10 GiB of which 0.31 GiB is free. Including non-PyTorch memory,"
        " this process has 78.70 GiB memory in use. Of the allocated memory 76.00 GiB is allocated"
        " by PyTorch, and 354.65 MiB is reserved by PyTorch but unallocated.\n"
    )


@pytest.mark.parametrize(
    ("text", "code", "equation"),
    [
        pytest.param(
            of("3.91 GiB", LOSS, "python t.py --model_name_or_path meta-llama/Llama-3.1-8B"
               " --per_device_train_batch_size 1 --max_length 8192"),
            "logits-loss",
            "3.91 GiB = 8,192 tokens x 128,256 words x 4 bytes: logits of Llama 3 8B in float32."
            " 1,024 tokens less save 501.0 MiB.",
            id="rows and length of a command",
        ),
        pytest.param(
            of("3.91 GiB", LOSS, "python t.py --model_name_or_path meta-llama/Llama-3.1-8B"
               " --per_device_train_batch_size 8 --max_length 2048"),
            "logits-loss",
            "3.91 GiB = 16,384 tokens x 128,256 words x 2 bytes: logits of Llama 3 8B in 16 bits.",
            id="whose tokens decide for 16 bits",
        ),
        pytest.param(
            of("4.64 GiB", LOSS, "I tune Qwen2.5-7B"),
            "logits-loss",
            "4.64 GiB = 8,192 tokens x 152,064 words x 4 bytes: logits of Qwen 2.5 7B in float32 (or"
            " 16,384 tokens in 16 bits).",
            id="one of two",
        ),
        pytest.param(
            of("4.64 GiB", "", "I tune Qwen2.5-7B"),
            "logits-loss",
            "4.64 GiB = 8,192 tokens x 152,064 words",
            id="a text without frames",
        ),
        pytest.param(
            of("592.00 MiB", MLP, "Qwen/Qwen2.5-7B, per_device_train_batch_size: 4, cutoff_len: 4096"),
            "capacity",
            "592.0 MiB = 16,384 tokens x 18,944 x 2 bytes: the MLP of one layer of Qwen 2.5 7B in",
            id="an MLP",
        ),
        pytest.param(
            of("8.00 GiB", SCORES, "llama-2-7b, per_device_train_batch_size=2"),
            "quadratic-attention",
            "8.00 GiB = 2 rows x 32 heads x 8,192 x 8,192 x 2 bytes: the scores of attention in 16",
            id="scores",
        ),
        pytest.param(
            of("1.96 GiB", STATES, "Meta-Llama-3-8B"),
            "optimizer-state",
            "1.96 GiB = 128,256 x 4,096 x 4 bytes: one embedding, or the head of Llama 3 8B in float32.",
            id="states",
        ),
        pytest.param(
            of("25.10 GiB", BUCKETS),
            "ddp-buckets",
            "25.10 GiB = 6.74 billion parameters x 4 bytes: their gradients in float32.",
            id="buckets",
        ),
    ],
)  # fmt: skip
def test_a_size_is_solved(text: str, code: str, equation: str) -> None:
    (first, *_) = explained(text).causes
    assert first.code == code
    (said,) = [line for line in first.evidence if " x " in line]
    assert said.startswith(equation)
    assert any(equation[:40] in str(line) for line in explained(text).brief())


@pytest.mark.parametrize(
    "text",
    [
        of("3.77 GiB", LOSS, "meta-llama/Llama-3.1-8B"),  # no number of tokens that is meant
        of("3.91 GiB", LOSS, "meta-llama/Llama-3.1-8B --per_device_train_batch_size 3 --max_length 999"),
        of("3.91 GiB", LOSS, "Llama-3.1-8B and Llama-2-7b"),
        of("3.91 GiB", "", "my own model"),
        of("1.00 GiB", MLP, "Qwen/Qwen2.5-7B, per_device_train_batch_size: 4, cutoff_len: 4096"),
        of("1.30 GiB", STATES, "Meta-Llama-3-70B"),
    ],
)  # fmt: skip
def test_a_size_that_nothing_gives_is_not_explained(text: str) -> None:
    (first, *_) = explained(text).causes
    assert not any(" x " in line for line in first.evidence)


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("unsloth/llama-3-8b-bnb-4bit", "llama-3-8b"),
        ("Llama 3.2 1B", "llama-3.2-1b"),
        ("meta-llama/Llama-3.2-3B", "llama-3.2-3b"),
        ("llama3.1:405b", ""),
        ("Llama-3.1-405B", "llama-3.1-405b"),
        ("Llama2-7b-hf", "llama-2-7b"),
        ("mistralai/Mistral-7B-v0.1", "mistral-7b-v0.1"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b-v0.3"),
        ("mistralai/Mistral-7B-v0.3", "mistral-7b-v0.3"),
        ("qwen2.5_1.5b", "qwen2.5-1.5b"),
        ("Qwen2.5-7B", "qwen2.5-7b"),
        ("Qwen/Qwen3-0.6B", "qwen3-0.6b"),
        ("qwen3 8b", "qwen3-8b"),
        ("SmolLM2-1.7B", "smollm2-1.7b"),
        ("HuggingFaceTB/SmolLM2-135M", "smollm2-135m"),
        ("SmolLM2-360M-Instruct", "smollm2-360m"),
        ("TinyLlama-1.1B-Chat", "tinyllama-1.1b"),
        ("facebook/opt-13b", "opt-13b"),
        ("gemma-2-27b-it, not gemma-2b", ""),
        ("CodeLlama-7b", ""),
    ],
)
def test_a_model_is_known_by_the_names_that_people_write(name: str, file: str) -> None:
    model = find_model(f"I train {name} with LoRA")
    if not file:
        assert model is None
        return
    config = json.loads((CONFIGS / f"{file}.json").read_text())
    assert model is not None
    assert model.vocabulary == config["vocab_size"]
    assert model.hidden == config["hidden_size"]
    assert model.intermediate == config.get("intermediate_size", config.get("ffn_dim"))
    assert model.heads == config["num_attention_heads"]
