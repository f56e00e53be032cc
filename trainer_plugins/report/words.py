"""Describes tensors at the peak, and the certainty of a predicted effect, in plain words."""

from trainer_plugins.planner.plan import TensorsAtPeak

_MODULES = {
    "the MLPs": ("mlp", "feed_forward"),
    "the attention": ("self_attn", "attn", "attention", "self_attention"),
    "the output layer": ("lm_head",),
    "the embeddings": ("embed_tokens", "wte"),
    "the norms before attention": ("input_layernorm",),
    "the norms before the MLPs": ("post_attention_layernorm",),
}
_PARTS = {module: part for part, modules in _MODULES.items() for module in modules}

# The certainty of a remedy's effect, by its grade (`explain.answer.Remedy`).
GRADES = {
    "predicted": "predicted",
    "replayed": "replayed",
    "arithmetic": "by arithmetic",
    "known": "not checked",
}


def words_of(group: TensorsAtPeak) -> str:
    """Describe equal tensors: "frozen weights of the MLPs".

    >>> group = dict(count=1, num_bytes=8, moment="forward", part="lm_head", operation="a.py:3 f")
    >>> words_of(TensorsAtPeak(category="frozen weights", **group))
    'frozen weights of the output layer'
    """
    part = _PARTS.get(group.part, group.part)
    if group.category == "activations":
        what = f"results of {group.operation}"
        return f"{what} in {part}" if part else what
    return f"{group.category} of {part}" if part else group.category
