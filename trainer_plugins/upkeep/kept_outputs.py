"""Judges the outputs that an evaluation keeps until its end, or keeps their argmax instead."""

import logging
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import EvalPrediction
from transformers.trainer_pt_utils import nested_numpify

from trainer_plugins import advice
from trainer_plugins.advice import Door
from trainer_plugins.finding import Finding, Severity
from trainer_plugins.units import size
from trainer_plugins.wrapped import tensors_in

logger = logging.getLogger(__name__)

Metrics = Callable[[EvalPrediction], dict[str, Any]]  # a `compute_metrics`

ROOM = 0.5  # fraction of free memory for kept outputs; forward passes need the rest
_FILLER = -100  # pads rows and logits of unequal length (transformers, evaluation_loop)


def count_kept_bytes(outputs: object, as_arrays: bool = False) -> int:
    """Return the bytes of the tensors in nested outputs, or of the numpy arrays made from them."""
    # numpy has no bfloat16, so nested_numpify makes float32.
    return sum(
        2 * each.nbytes if as_arrays and each.dtype == torch.bfloat16 else each.nbytes
        for each in tensors_in(outputs)
    )


def judge_kept(
    batch_bytes: int, num_batches: int, are_joined: bool, free_bytes: int, place: str
) -> Finding | None:
    """Judge whether the outputs of all batches fit; `free_bytes` includes those kept already."""
    need = batch_bytes * num_batches * (2 if are_joined else 1)
    if need <= ROOM * free_bytes:
        return None
    joined = ", held twice while they are joined" if are_joined else ""
    return Finding(
        code="evaluation-gathers-logits",
        severity=Severity.ERROR if need > free_bytes else Severity.WARNING,
        summary=f"an evaluation needs {size(need)} for its outputs at its end, but {place} has"
        f" {size(free_bytes)} free",
        evidence=f"{num_batches:,} batches of {size(batch_bytes)}{joined}",
        remedy=f"If metrics need no logits, pass {advice.EVALUATION_GUARD.flag(Door.CODE)}; if they"
        " do, and main memory has room for them, set"
        f" {advice.OUTPUTS_TO_MAIN_MEMORY.flag(Door.ARGUMENTS, steps=1)}.",
        amount=float(need),
        data={
            "needed_bytes": need,
            "free_bytes": free_bytes,
            "num_batches": num_batches,
            "batch_bytes": batch_bytes,
        },
    )


class Argmaxed:
    """Answers `argmax` over the last axis as an array of all logits would; refuses all else."""

    def __init__(self, places: NDArray[np.int64], num_classes: int) -> None:
        self._places = places
        self.shape = (*places.shape, num_classes)
        self.ndim = len(self.shape)

    def __len__(self) -> int:
        return len(self._places)

    def argmax(self, axis: int | None = None, out: None = None) -> NDArray[np.int64]:
        """Return the index of the largest logit of each row; `np.argmax` calls this."""
        if axis not in (-1, self.ndim - 1) or out is not None:
            raise TypeError("of these logits only the argmax over the last axis was kept")
        # In a padded row all logits are equal, and argmax returns the first one.
        return np.where(self._places == _FILLER, 0, self._places)

    def __array__(self, *args: object, **kwargs: object) -> NDArray[Any]:
        raise TypeError("of these logits only the argmax over the last axis was kept")


def explain_no_argmax(metrics: Metrics, outputs: object, labels: object) -> str:
    """Return why the argmax cannot replace the logits; empty if both give the same metrics."""
    if not isinstance(outputs, torch.Tensor) or not outputs.is_floating_point():
        return f"the model returns {type(outputs).__name__}, not just logits"
    if outputs.dim() < 2:
        return "each row's output is a single number"
    try:
        arrays = nested_numpify(labels)
        ids = outputs.argmax(-1).cpu().numpy()
        of_logits = metrics(EvalPrediction(deepcopy(nested_numpify(outputs)), deepcopy(arrays)))
        of_argmax = metrics(_prediction(ids, outputs.shape[-1], deepcopy(arrays)))
    except Exception as error:
        logger.debug("compute_metrics failed on the first batch", exc_info=True)
        return f"compute_metrics raises {type(error).__name__}: {error}"
    if _are_same(of_logits, of_argmax):
        return ""
    return f"compute_metrics returns {of_argmax}, not {of_logits}"


def metrics_of_argmax(metrics: Metrics, num_classes: int) -> Metrics:
    """Return a `compute_metrics` that feeds the argmax to the user's function instead of logits."""
    return lambda kept: metrics(_prediction(kept.predictions, num_classes, kept.label_ids))


def _prediction(places: NDArray[np.int64], num_classes: int, labels: Any) -> EvalPrediction:
    return EvalPrediction(predictions=Argmaxed(places, num_classes), label_ids=labels)


def _are_same(one: object, other: object) -> bool:
    if not isinstance(one, dict) or not isinstance(other, dict) or one.keys() != other.keys():
        return False
    return all(
        value == other[name]
        if isinstance(value, str)
        else np.array_equal(value, other[name], equal_nan=True)
        for name, value in one.items()
    )
