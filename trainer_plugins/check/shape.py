"""Reads from the config of a model the sizes that make memory grow with length."""

from collections.abc import Mapping

from trainer_plugins.check.facts import Shape

_NAMES = {
    "vocab_size": ("vocab_size",),
    "num_layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "num_heads": ("num_attention_heads", "n_head", "num_heads"),
    "width": ("hidden_size", "n_embd", "d_model"),
}


def shape_of(config: Mapping[str, object]) -> Shape | None:
    """Return the sizes of a model of language, or of such a part of it; None if it has none.

    >>> shape_of({"vocab_size": 8, "n_layer": 2, "n_head": 4, "n_embd": 64})
    Shape(vocab_size=8, num_layers=2, num_heads=4, num_key_value_heads=4, head_size=16)
    """
    inner = config.get("text_config")
    if isinstance(inner, Mapping):
        return shape_of(inner)
    found = {
        name: next((config[key] for key in keys if isinstance(config.get(key), int)), None)
        for name, keys in _NAMES.items()
    }
    vocabulary, layers, heads, width = found.values()
    if not (isinstance(vocabulary, int) and isinstance(layers, int) and isinstance(heads, int)):
        return None
    groups, head = config.get("num_key_value_heads"), config.get("head_dim", config.get("d_kv"))
    return Shape(
        vocab_size=vocabulary,
        num_layers=layers,
        num_heads=heads,
        num_key_value_heads=groups if isinstance(groups, int) else heads,
        head_size=head
        if isinstance(head, int)
        else (width if isinstance(width, int) else 0) // heads,
    )


def predicts_tokens(name: str) -> bool:
    """Return whether a class of this name has a loss over all words of its vocabulary."""
    return any(part in name for part in ("CausalLM", "ConditionalGeneration", "LMHead", "MaskedLM"))
