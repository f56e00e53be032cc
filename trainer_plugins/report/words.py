"""Describes tensors at the peak, and the certainty of a predicted effect, in plain words."""

from trainer_plugins.planner.plan import TensorsAtPeak

_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}

# The tensors of cross entropy, by operation (torch/nn/functional.py, cross_entropy).
_LOGITS = {
    "aten::_to_copy": "{dtype} copy of the logits",
    "aten::_log_softmax": "{dtype} log-probabilities of the loss",
    "aten::_log_softmax_backward_data": "{dtype} gradient of the logits",
    "aten::nll_loss_backward": "{dtype} gradient of the log-probabilities",
    "aten::mm": "{dtype} logits",
    "aten::addmm": "{dtype} logits",
    "aten::add": "{dtype} logits",
}
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

    >>> group = dict(count=1, num_bytes=8, moment="forward", part="lm_head", dtype="float32")
    >>> words_of(TensorsAtPeak(category="logits and loss", operation="aten::_to_copy", **group))
    'fp32 copy of the logits'
    >>> words_of(TensorsAtPeak(category="frozen weights", operation="aten::empty", **group))
    'frozen weights of the output layer'
    """
    dtype = _DTYPES.get(group.dtype, group.dtype)
    if group.category == "logits and loss" and group.operation in _LOGITS:
        return _LOGITS[group.operation].format(dtype=dtype)
    part = _PARTS.get(group.part, group.part)
    if group.category == "activations":
        made = group.operation.removeprefix("aten::").strip("_")
        what = f"{dtype} copies" if made == "to_copy" else f"results of {made}"
        return f"{what} in {part}" if part else what
    return f"{group.category} of {part}" if part else group.category
