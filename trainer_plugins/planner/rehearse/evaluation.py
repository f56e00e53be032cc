"""Rehearse an evaluation: its first batches really run, those between make what they would keep."""

from collections.abc import Iterable
from typing import Any

import torch

from trainer_plugins.planner.trainer import TrainerLike
from trainer_plugins.units import size

_EVALUATION_STEPS_RUN = 2


def evaluate(trainer: TrainerLike, num_batches: int) -> list[str]:
    """Evaluate once, and say what a `compute_metrics` would keep if the Trainer has none.

    See transformers/trainer.py, evaluation_loop: without `compute_metrics` only losses are kept.
    With one the outputs of `eval_accumulation_steps` batches, or of all, stay on the card, and each
    batch joins them in a new tensor.
    """
    batch_bytes: list[int] = []
    if trainer.compute_metrics is None:
        _note_outputs(trainer, batch_bytes)
    _skip_like_evaluation_steps(trainer, num_batches)
    trainer.evaluate()
    if not batch_bytes:
        return []
    num_kept = min(trainer.args.eval_accumulation_steps or num_batches, num_batches)
    return [
        "the evaluation has no compute_metrics; with one (--metrics), the outputs of "
        f"{num_kept} batch{'es' if num_kept > 1 else ''} stay on the card, "
        f"{size(batch_bytes[0] * num_kept)}, and twice that while they are joined"
    ]


def _note_outputs(trainer: TrainerLike, batch_bytes: list[int]) -> None:
    """Note the bytes of a batch's outputs that an evaluation with metrics would keep."""
    compute_loss = trainer.compute_loss

    def noting(*args: Any, **kwargs: Any) -> object:
        found: Any = compute_loss(*args, **kwargs)
        if not batch_bytes and kwargs.get("return_outputs"):
            config = getattr(trainer.model, "config", None)
            ignored = {"loss", *getattr(config, "keys_to_ignore_at_inference", ())}
            outputs = found[1]
            if isinstance(outputs, dict):
                outputs = [value for name, value in outputs.items() if name not in ignored]
            batch_bytes.append(sum(tensor.nbytes for tensor in _tensors(outputs)))
        return found

    trainer.compute_loss = noting


def _tensors(value: object) -> Iterable[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)


def _skip_like_evaluation_steps(trainer: TrainerLike, num_batches: int) -> None:
    """Skip the middle evaluation steps, but make their predictions, which may stay on the card."""
    prediction_step = trainer.prediction_step
    count = 0
    shapes: object = None

    def step(*args: object, **kwargs: object) -> object:
        nonlocal count, shapes
        count += 1
        if _EVALUATION_STEPS_RUN < count < num_batches and shapes is not None:
            return _like(shapes)
        result = prediction_step(*args, **kwargs)
        shapes = _shapes(result)
        return result

    trainer.prediction_step = step


class _Shape:
    """Keeps the shape, dtype and device of a tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._shape, self._dtype, self._device = tensor.shape, tensor.dtype, tensor.device

    def empty(self) -> torch.Tensor:
        return torch.empty(self._shape, dtype=self._dtype, device=self._device)


def _shapes(value: object) -> object:
    """Return a nested value with shapes in place of tensors, and None for anything else."""
    if isinstance(value, torch.Tensor):
        return _Shape(value)
    if isinstance(value, (list, tuple)):
        return [_shapes(each) for each in value]
    return (
        {name: _shapes(each) for name, each in value.items()} if isinstance(value, dict) else None
    )


def _like(shapes: object) -> object:
    """Return what `_shapes` was given, with new tensors."""
    if isinstance(shapes, _Shape):
        return shapes.empty()
    if isinstance(shapes, list):
        return tuple(_like(each) for each in shapes)
    return (
        {name: _like(each) for name, each in shapes.items()} if isinstance(shapes, dict) else None
    )
