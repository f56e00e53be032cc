"""A model and data small enough to train in a blink."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def tiny_llama(**config) -> LlamaForCausalLM:
    """43 thousand parameters; the same weights every time."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 256}
    return LlamaForCausalLM(
        LlamaConfig(**{**sizes, **heads, "pad_token_id": 0, "eos_token_id": 127, **config})
    )


def token_rows(num_rows: int = 64, length: int = 32) -> list[dict[str, torch.Tensor]]:
    rows = torch.randint(1, 127, (num_rows, length), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in rows]


SMALL_GPT2 = {
    "model_type": "gpt2",
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "vocab_size": 1000,
    "n_positions": 128,
}
"""A config.json of which a plan takes seconds."""
