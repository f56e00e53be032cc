"""Rehearse an evaluation: its first batches really run, those between make what they would keep."""

from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from trainer_plugins.hf_trainer import HfTrainer
from trainer_plugins.units import size
from trainer_plugins.wrapped import tensors_in

_EVALUATION_STEPS_RUN = 2


def evaluate(trainer: HfTrainer, num_batches: int) -> list[str]:
    """Evaluate once, and say what a `compute_metrics` would keep if the Trainer has none.

    With one, the outputs of `eval_accumulation_steps` batches, or of all, stay on the card, and
    each batch joins them in a new tensor (transformers/trainer.py, evaluation_loop).
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


def _note_outputs(trainer: HfTrainer, batch_bytes: list[int]) -> None:
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
            batch_bytes.append(sum(tensor.nbytes for tensor in tensors_in(outputs)))
        return found

    trainer.compute_loss = noting


def _skip_like_evaluation_steps(trainer: HfTrainer, num_batches: int) -> None:
    """Skip the middle evaluation steps, but make their predictions, which may stay on the card."""
    prediction_step = trainer.prediction_step
    count = 0
    makers: object = None

    def step(*args: object, **kwargs: object) -> object:
        nonlocal count, makers
        count += 1
        if _EVALUATION_STEPS_RUN < count < num_batches and makers is not None:
            return tree_map_only(partial, lambda make: make(), makers)
        result = prediction_step(*args, **kwargs)
        makers = tree_map_only(
            torch.Tensor,
            lambda each: partial(torch.empty, each.shape, dtype=each.dtype, device=each.device),
            result,
        )
        return result

    trainer.prediction_step = step
