"""A model and data small enough to train in a blink."""

from typing import Any

import torch
import transformers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    TrainingArguments,
)

IS_OLD = transformers.__version__.startswith("4.")
IN_ORDER = {"train_sampling_strategy": "sequential"}  # no row is shuffled
if not hasattr(TrainingArguments, "train_sampling_strategy"):
    IN_ORDER = {}


def tiny_llama(**config) -> LlamaForCausalLM:
    """43 thousand parameters; the same weights every time."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 256}
    return LlamaForCausalLM(
        LlamaConfig(**{**sizes, **heads, "pad_token_id": 0, "eos_token_id": 127, **config})
    )


def longrope_phi3(boundary: int, vocab_size: int = 128) -> Phi3ForCausalLM:
    """Takes other frequencies once the longest sequence is longer than the boundary; in float64."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "pad_token_id": 0}
    lengths = {"max_position_embeddings": 256, "original_max_position_embeddings": boundary}
    factors = {"short_factor": [1.0] * 4, "long_factor": [8.0] * 4}
    rope = {"rope_scaling": {"type": "longrope", **factors}}
    config = Phi3Config(
        **{"vocab_size": vocab_size, **sizes, **heads, **lengths, **rope},
        attn_implementation="eager",
        use_cache=False,
    )
    return Phi3ForCausalLM(config).double()


def tiny_t5(**config) -> T5ForConditionalGeneration:
    torch.manual_seed(0)
    sizes = {"vocab_size": 128, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2}
    return T5ForConditionalGeneration(
        T5Config(**{**sizes, "num_heads": 4, "decoder_start_token_id": 0, **config})
    )


def checkpointing(*, reentrant: bool) -> dict[str, Any]:
    """Return the arguments of a Trainer that switch it on."""
    how = {"use_reentrant": reentrant}
    return {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": how}


def token_rows(num_rows: int = 64, length: int = 32) -> list[dict[str, torch.Tensor]]:
    rows = torch.randint(1, 127, (num_rows, length), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in rows]


QUIET: dict[str, Any] = {
    "report_to": "none",
    "save_strategy": "no",
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
}
"""Arguments of a Trainer of which nothing is left but its timeline."""

SMALL_GPT2 = {
    "model_type": "gpt2",
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "vocab_size": 1000,
    "n_positions": 128,
}
"""A config.json of which a plan takes seconds."""
