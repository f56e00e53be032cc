"""Reads the frames of a traceback: the moment of a run, its batch, and lines for a record."""

import os
import re
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path
from traceback import extract_tb, walk_tb
from types import FrameType, TracebackType

import torch

from trainer_plugins.launch.masked import mask_text
from trainer_plugins.record.oom_record import Moment, Part, Shape
from trainer_plugins.record.shown import Frame

_PACKAGE = str(Path(__file__).parents[1]) + os.sep
_MOST_FRAMES = 80
_MOST_TENSORS = 20
_OURS = (
    "trainer_plugins/callbacks/oom_reporter.py",
    "trainer_plugins/callbacks/_run.py",
    "trainer_plugins/survival/attach.py",
)

# Functions of Trainers for each moment. The first row wins: a save in training is a save.
_MOMENTS: tuple[tuple[Moment, frozenset[str]], ...] = (
    ("save", frozenset({"_save_checkpoint", "save_model", "_save_optimizer_and_scheduler"})),
    (
        "resume",
        frozenset({"_load_from_checkpoint", "_load_optimizer_and_scheduler", "_load_best_model"}),
    ),
    ("predict", frozenset({"predict"})),
    ("eval", frozenset({"evaluate", "evaluation_loop", "prediction_loop", "prediction_step"})),
    ("train", frozenset({"training_step", "compute_loss", "_run_epoch", "get_batch_samples"})),
)
_STEP_EVENTS = frozenset({"on_step_begin", "on_step_end", "on_substep_end", "on_log"})
# The step itself drops its batch before the backward pass; the loop around it does not.
_BATCH_OF = frozenset(
    {"_inner_training_loop", "_run_epoch", "evaluation_loop", "training_step", "prediction_step"}
)
_KNOWN = _BATCH_OF.union(*(names for _, names in _MOMENTS))
_OPTIMIZER = re.compile(r"\boptim", re.IGNORECASE)


def traceback_frames(traceback: TracebackType | None) -> list[FrameType]:
    """Return the frames of a traceback, outermost first. They hold tensors, so drop them soon."""
    # The outermost handles the error and is running: reading its variables would keep the error.
    return [frame for frame, _ in walk_tb(traceback)][1:]


def render_frames(traceback: TracebackType | None) -> tuple[Frame, ...]:
    """Render the innermost 80 frames of a traceback, with paths that begin at a package."""
    frames = [
        Frame(file=file, line=each.lineno or 0, function=each.name, code=mask_text(each.line or ""))
        for each in extract_tb(traceback)
        if (file := public_path(each.filename)) not in _OURS
    ]
    return tuple(frames[-_MOST_FRAMES:])


def public_path(path: str) -> str:
    """Shorten a path to the part that identifies the code.

    >>> public_path("/home/me/env/lib/python3.11/site-packages/torch/nn/modules/module.py")
    'torch/nn/modules/module.py'
    >>> public_path("/home/me/secret project/train.py")
    'train.py'
    """
    for folder in ("site-packages", "dist-packages"):
        _, found, inside = path.rpartition(f"{os.sep}{folder}{os.sep}")
        if found:
            return inside
    if path.startswith(_PACKAGE):
        return os.path.join("trainer_plugins", path[len(_PACKAGE) :])
    library = sysconfig.get_paths()["stdlib"] + os.sep
    if path.startswith(library):
        return path[len(library) :]
    here = os.getcwd() + os.sep
    return path[len(here) :] if path.startswith(here) else os.path.basename(path)


def find_moment(frames: list[FrameType], trainer_class: type | None) -> tuple[Moment, Part]:
    """Determine the moment of the run, and the part of the step."""
    part = _part(frames)
    codes = [frame.f_code for frame in frames]
    if any(code.co_name == "generate" and "generat" in code.co_filename for code in codes):
        return "generate", part
    if trainer_class is None:
        return "other", part
    names = {frame.f_code.co_name for frame in _methods_of(frames, trainer_class)}
    for moment, functions in _MOMENTS:
        if names & functions:
            return moment, part
    is_in_step = part == "optimizer" or any(code.co_name in _STEP_EVENTS for code in codes)
    return ("train" if is_in_step else "begin"), part


def batch_of(frames: list[FrameType], trainer_class: type | None) -> dict[str, Shape]:
    """Return the shapes of the batch in the Trainer's innermost step."""
    if trainer_class is None:
        return {}
    found: dict[str, Shape] = {}
    for frame in _methods_of(frames, trainer_class):
        if frame.f_code.co_name in _BATCH_OF:
            found = _shapes(frame.f_locals.get("inputs")) or found
    return found


def drop_variables(frames: list[FrameType]) -> None:
    """Release the variables that `batch_of` made running frames hold."""
    # Before Python 3.13 a frame keeps the dictionary that reading its variables creates.
    for frame in frames:
        if frame.f_code.co_name in _KNOWN and type(frame.f_locals) is dict:
            frame.f_locals.clear()


def _methods_of(frames: list[FrameType], trainer_class: type) -> Iterator[FrameType]:
    for frame in frames:
        # Names first: reading a frame's variables creates another reference to each.
        if frame.f_code.co_name in _KNOWN and isinstance(frame.f_locals.get("self"), trainer_class):
            yield frame


def _part(frames: list[FrameType]) -> Part:
    for frame in reversed(frames):
        code = frame.f_code
        if code.co_name == "step" and _OPTIMIZER.search(public_path(code.co_filename)):
            return "optimizer"
    names = {frame.f_code.co_name for frame in frames}
    if "backward" in names:
        return "backward"
    return "forward" if names & {"forward", "_call_impl"} else ""


def _shapes(inputs: object, prefix: str = "") -> dict[str, Shape]:
    if not isinstance(inputs, Mapping):
        return {}
    found: dict[str, Shape] = {}
    for name, value in inputs.items():
        if isinstance(value, torch.Tensor):
            dtype = str(value.dtype).removeprefix("torch.")
            found[f"{prefix}{name}"] = Shape(shape=tuple(value.shape), dtype=dtype)
        elif not prefix:
            found |= _shapes(value, f"{name}.")
        if len(found) >= _MOST_TENSORS:
            break
    return found
