"""Read a stack: the work during which memory was allocated, and the user's line that asked."""

import re
from collections.abc import Sequence
from itertools import pairwise, takewhile
from typing import Literal, NamedTuple

from trainer_plugins.printable import printable
from trainer_plugins.snapshot.cards import Stack, StackFrame
from trainer_plugins.snapshot.owners import OF_TORCH, is_ours, is_users

Work = Literal[
    "optimizer", "evaluation", "generation", "parameters", "saving", "gathering", "backward",
    "loss", "forward", "other", "unknown",
]  # fmt: skip
"""The program's work at that moment; `unknown` if no frame was recorded."""

NOWHERE = "a place that was not recorded"

_PYTHON = re.compile(r"\.py$|^<ipython-input|^<stdin>|/ipykernel_")
_NODE = re.compile(r"torch::autograd::generated::(\w+)::apply")

# Rules that map frames to work, by the end of the file name and by function; the first rule that
# matches any frame of a stack decides. Files and names are torch 2.13's and transformers 5.23's.
_RULES: tuple[tuple[Work, str, str], ...] = (
    ("optimizer", r"/torch/optim/\w+\.py$|/bitsandbytes/optim/|/apex/optimizers/", ""),
    ("optimizer", r"/deepspeed/(?:ops/adam|runtime/.*optimizer|runtime/zero/stage)", "step|init"),
    ("optimizer", r"(?i:/optim(?:i[sz]ers?)?(?:/\w+)?\.py$)", r"^(?:step|__init__|_init_\w+)$"),
    ("evaluation", "", "^(?:nested_concat|pad_across_processes|_nested_gather|add_batch)$"),
    ("generation", r"/transformers/cache_utils\.py$", ""),
    ("parameters", "", "^(?:from_pretrained|_?load_state_dict|_load_pretrained_model)$"),
    # run by a loading thread, without `from_pretrained` in its stack
    ("parameters", r"/transformers/core_model_loading\.py$", ""),
    ("parameters", r"/peft/utils/other\.py$", "^prepare_model_for_kbit_training$"),
    ("parameters", r"/accelerate/accelerator\.py$", "^prepare_model$|^_prepare_fsdp2$"),
    ("parameters", r"/torch/serialization\.py$|/torch/nn/parallel/replicate\.py$", ""),
    (
        "saving",
        "",
        "^(?:state_dict|_get_model_state_dict|_?save_checkpoint|_?save_model|save_pretrained)$",
    ),
    # FSDP2, FSDP1 and ZeRO-3 gather a layer's parameters for a while
    ("backward", r"/distributed/fsdp/", "^_?post_backward(?:_hook)?$"),
    ("backward", r"/deepspeed/runtime/zero/stage", "reduce|ipg"),
    ("gathering", r"/distributed/fsdp/_fully_shard/", "unshard|all_gather|unsharded_param"),
    ("gathering", r"/distributed/fsdp/_(?:flat_param|runtime_utils)\.py$", "unshard|all_gather"),
    ("gathering", r"/deepspeed/runtime/zero/partition", "gather|^fetch_sub_module$"),
    ("loss", r"/torch/nn/functional\.py$", "^(?:cross_entropy|nll_loss|log_softmax)$"),
    ("loss", "/transformers/loss/", ""),
    ("loss", "", "cross_entropy"),
    ("loss", r"/chunked_logprob\.py$|/liger_kernel/chunked_loss/", ""),
    # the outermost module's output, as the loss uses it
    ("loss", r"/accelerate/utils/operations\.py$", "^_convert_to_fp32$"),
)
_HEAD = re.compile(r"logit|lm_head|logps|log_?probs?|log_softmax")
_MODEL_FILE = re.compile(r"/modeling_\w+\.py$")
_LINEAR = re.compile(r"/torch/nn/(?:modules/linear|functional)\.py$|/bitsandbytes/nn/")
_PARAMETERS = re.compile(r"/torch/nn/(?:modules/(?!module\.py)|init\.py|parameter\.py)")

_MOST_LINES = 4


class Meaning(NamedTuple):
    """Holds the work and the place of one stack."""

    work: Work
    place: str  # the innermost line outside libraries, as people name it


def meaning_of(stack: Stack) -> Meaning:
    """Read a stack."""
    frames, python = _read(stack)
    return Meaning(_work(frames, python), _place(frames, python))


def lines_of(stack: Stack) -> list[str]:
    """Name the innermost lines of the user's code, or the place if there are none."""
    frames, python = _read(stack)
    own = [line_of(frame) for frame in python if is_users(frame.file)]
    return own[:_MOST_LINES] or [_place(frames, python)]


def line_of(frame: StackFrame) -> str:
    """Name a frame: its folder, file, line and function."""
    return printable(f"{'/'.join(frame.file.split('/')[-2:])}:{frame.line} {frame.name}")


def is_python(frame: StackFrame) -> bool:
    """Return whether a frame is Python, not C++."""
    return _PYTHON.search(frame.file) is not None


def _read(stack: Stack) -> tuple[list[StackFrame], list[StackFrame]]:
    """Return all frames, and the Python ones, without this package's if there are others."""
    frames = [frame._replace(file=frame.file.replace("\\", "/")) for frame in stack]
    python = [frame for frame in frames if is_python(frame)]
    return frames, [frame for frame in python if not is_ours(frame.file)] or python


def _work(frames: Sequence[StackFrame], python: Sequence[StackFrame]) -> Work:
    if not frames:
        return "unknown"
    for work, file, name in _RULES:
        if any(re.search(file, frame.file) and re.search(name, frame.name) for frame in python):
            return work
    in_module = any(frame.name in ("_call_impl", "forward") for frame in python)
    if not in_module and (any(map(_is_engine, frames)) or _is_function_backward(python)):
        return "backward"
    if _is_head(python):
        return "loss"
    if in_module:  # including a checkpoint's recomputation within the backward pass
        return "forward"
    makes = any(frame.name == "__init__" or _makes_parameters(frame) for frame in python)
    return "parameters" if makes else "other"


def _is_head(python: Sequence[StackFrame]) -> bool:
    """Return whether the head allocated: by its name, or called by the outermost module itself."""
    of_layer = takewhile(lambda frame: frame.name != "_call_impl", python)
    inner = [frame.name for frame in of_layer if not OF_TORCH.search(frame.file)]
    if any(map(_HEAD.search, inner[:2])):
        return True
    forwards = [frame.file for frame in python if frame.name == "forward"]
    of_model = list(filter(_MODEL_FILE.search, forwards))
    return bool(of_model and _LINEAR.search(python[0].file)) and of_model.count(of_model[0]) == 1


def _is_engine(frame: StackFrame) -> bool:
    return frame.name.startswith(("torch::autograd::Engine", "torch::autograd::python::")) or (
        frame.name in ("_engine_run_backward", "backward") and "/torch/" in frame.file
    )


def _is_function_backward(python: Sequence[StackFrame]) -> bool:
    return any(
        inner.name == "backward" and outer.file.endswith("/torch/autograd/function.py")
        for inner, outer in pairwise(python)
    )


def _makes_parameters(frame: StackFrame) -> bool:
    if frame.file.endswith("/torch/nn/modules/module.py"):
        return frame.name in ("_apply", "to", "cuda", "to_empty")
    return _PARAMETERS.search(frame.file) is not None


def _place(frames: Sequence[StackFrame], python: Sequence[StackFrame]) -> str:
    own = next((frame for frame in python if is_users(frame.file)), None)
    # A transformers model is not the user's code, but says more than `trainer.train()`.
    innermost = next((frame for frame in python if not OF_TORCH.search(frame.file)), own)
    if own is not None and innermost is not None:
        return line_of(own) if innermost is own else f"{line_of(innermost)}, of {line_of(own)}"
    for frame in frames:
        if node := _NODE.search(frame.name):
            return f"backward of {printable(node[1])}"
    if python and all(map(_is_engine, python)):
        return "the backward pass"
    if innermost is not None or python:
        return line_of(innermost or python[0])
    if any(_is_engine(frame) for frame in frames):
        return "the backward pass"
    return "C++, called by no line of Python" if frames else NOWHERE
