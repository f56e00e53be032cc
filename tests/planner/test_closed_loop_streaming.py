"""A streamed base: predicted, then really run on the simulated card, and compare.

The base is most of each model, so that a layer more or less on the card would be seen.
"""

from typing import Any

import pytest
import torch
import transformers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from tests.planner.loop import Loop
from tests.planner.test_closed_loop import run
from trainer_plugins import StreamBase

peft = pytest.importorskip("peft")

VOCABULARY = 300
REENTRANT: dict[str, Any] = {
    "gradient_checkpointing": True,
    "gradient_checkpointing_kwargs": {"use_reentrant": True},
}
CHECKPOINTING: dict[str, Any] = {
    "gradient_checkpointing": True,
    "gradient_checkpointing_kwargs": {"use_reentrant": False},
}
ACCUMULATION: dict[str, Any] = {"gradient_accumulation_steps": 3}
AUTOCAST: dict[str, Any] = {"bf16": True}


def with_lora(model, dropout: float):
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_modules="all-linear", lora_dropout=dropout)
    if transformers.__version__.startswith("4."):  # later ones do it for reentrant checkpointing
        model.enable_input_require_grads()
    return peft.get_peft_model(model, config)


def llama() -> LlamaForCausalLM:
    sizes = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, pad_token_id=0, **sizes, **heads))


def gpt2() -> GPT2LMHeadModel:
    sizes = {"n_embd": 192, "n_layer": 4, "n_head": 4, "n_positions": 64}
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, **sizes))


def t5() -> T5ForConditionalGeneration:
    sizes = {"d_model": 192, "d_kv": 48, "d_ff": 512, "num_layers": 3, "num_heads": 4}
    ids = {"decoder_start_token_id": 0, "pad_token_id": 0}
    return T5ForConditionalGeneration(T5Config(vocab_size=VOCABULARY, **sizes, **ids))


def rows() -> list[dict[str, torch.Tensor]]:
    tokens = torch.randint(1, VOCABULARY, (36, 32), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in tokens]


def streamed(model, layers: int, dropout: float = 0.0, embeddings: bool = False, **arguments):
    def make(folder):
        return run(
            folder,
            with_lora(model(), dropout),
            data=rows(),
            callbacks=[StreamBase(layers, embeddings, on_refusal="error")],
            per_device_train_batch_size=4,
            **arguments,
        )

    return make


RUNS = {
    "two layers": streamed(llama, 2, 0.1, **ACCUMULATION),
    "three layers": streamed(llama, 3),
    "checkpointing": streamed(llama, 1, 0.1, **CHECKPOINTING),
    "checkpointing, accumulation": streamed(llama, 2, **CHECKPOINTING, **ACCUMULATION),
    "reentrant": streamed(llama, 2, 0.1, **REENTRANT),
    "reentrant, accumulation": streamed(llama, 1, **REENTRANT, **ACCUMULATION),
    "autocast": streamed(llama, 1, 0.1, **AUTOCAST),
    "embeddings": streamed(llama, 2, embeddings=True, **CHECKPOINTING),
    "gpt2": streamed(gpt2, 2, 0.1, **ACCUMULATION),
    "t5, checkpointing": streamed(t5, 3, **CHECKPOINTING),
}
LOOP = Loop(RUNS)


@pytest.mark.parametrize("name", RUNS)
def test_the_card_holds_what_was_predicted(simgpu, tmp_path, name):
    plan = LOOP.goes_round(name, tmp_path)

    assert plan.streamed is not None
    assert plan.breakdown["frozen weights"] < 0.9 * plan.streamed.num_bytes
