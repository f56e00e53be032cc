"""The size that was refused is solved where a text names the model, its rows or its length."""

import pytest

from tests.explain.stated import explained

PLACES = {
    "loss": ("transformers/loss/loss_utils.py", "ForCausalLMLoss", "logits = logits.float()"),
    "mlp": ("transformers/models/qwen2/modeling_qwen2.py", "forward", "self.act_fn(self.gate_proj(x))"),
    "scores": ("transformers/models/llama/modeling_llama.py", "eager", "attn_weights = torch.matmul(query, key)"),
    "states": ("torch/optim/adamw.py", "_init_group", 'state["exp_avg"] = torch.zeros_like('),
    "buckets": ("torch/nn/parallel/distributed.py", "_ddp_init_helper", "self.reducer = dist.Reducer("),
}  # fmt: skip
LLAMA = "python t.py --model_name_or_path meta-llama/Llama-3.1-8B --per_device_train_batch_size"
QWEN = "Qwen/Qwen2.5-7B, per_device_train_batch_size: 4, cutoff_len: 4096"


def of(said: str, place: str, asked: str) -> str:
    file, function, code = PLACES.get(place, ("", "", ""))
    frame = f'  File "/v/site-packages/{file}", line 36, in {function}\n    {code}\n' * bool(place)
    return (
        f"{said}\n{frame}torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {asked}. GPU 0"
        " has a total capacity of 79.10 GiB of which 0.31 GiB is free. Including non-PyTorch memory,"
        " this process has 78.70 GiB memory in use. Of the allocated memory 76.00 GiB is allocated"
        " by PyTorch, and 354.65 MiB is reserved by PyTorch but unallocated.\n"
    )


@pytest.mark.parametrize(
    ("said", "place", "code", "equation"),
    [
        (f"{LLAMA} 1 --max_length 8192", "loss", "logits-loss",
         "3.91 GiB = 8,192 tokens x 128,256 words x 4 bytes: logits of Llama 3 8B in float32."
         " 1,024 tokens fewer save 501.0 MiB."),
        (f"{LLAMA} 8 --max_length 2048", "loss", "logits-loss",
         "3.91 GiB = 16,384 tokens x 128,256 words x 2 bytes: logits of Llama 3 8B in 16 bits."),
        ("I tune Qwen2.5-7B", "loss", "logits-loss",
         "4.64 GiB = 8,192 tokens x 152,064 words x 4 bytes: logits of Qwen 2.5 7B in float32 (or"
         " 16,384 tokens in 16 bits)."),
        ("I tune Qwen2.5-7B", "", "logits-loss", "4.64 GiB = 8,192 tokens x 152,064 words"),
        (QWEN, "mlp", "capacity",
         "592.0 MiB = 16,384 tokens x 18,944 x 2 bytes: the MLP of one layer of Qwen 2.5 7B in"),
        ("llama-2-7b, per_device_train_batch_size=2", "scores", "quadratic-attention",
         "8.00 GiB = 2 rows x 32 heads x 8,192 x 8,192 x 2 bytes: the scores of attention in 16"),
        ("Meta-Llama-3-8B", "states", "optimizer-state",
         "1.96 GiB = 128,256 x 4,096 x 4 bytes: one embedding, or the head of Llama 3 8B in float32."),
        ("", "buckets", "ddp-buckets",
         "25.10 GiB = 6.74 billion parameters x 4 bytes: their gradients in float32."),
    ],
)  # fmt: skip
def test_a_size_is_solved(said: str, place: str, code: str, equation: str) -> None:
    asked = equation.partition(" = ")[0].replace("592.0", "592.00")
    answer = explained(of(said, place, asked))
    assert answer.causes[0].code == code
    (line,) = [each for each in answer.causes[0].evidence if " x " in each]
    assert line.startswith(equation)
    assert line in [each.text for each in answer.brief()]


@pytest.mark.parametrize(
    ("said", "place", "asked"),
    [
        ("meta-llama/Llama-3.1-8B", "loss", "3.77 GiB"),  # no number of tokens that is meant
        (f"{LLAMA} 3 --max_length 999", "loss", "3.91 GiB"),
        ("Llama-3.1-8B and Llama-2-7b", "loss", "3.91 GiB"),
        ("my own model", "", "3.91 GiB"),
        (QWEN, "mlp", "1.00 GiB"),
        ("Meta-Llama-3-70B", "states", "1.30 GiB"),
    ],
)
def test_a_size_that_nothing_gives_is_not_explained(said: str, place: str, asked: str) -> None:
    assert not any(" x " in line for line in explained(of(said, place, asked)).causes[0].evidence)
