"""Class weights: find those of a weighted cross-entropy, whose mean is divided by their sum."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trainer_plugins.survival.exact.layouts import Inputs
from trainer_plugins.survival.exact.shares import Weight, labels_of

_WEIGHTED = ("aten::nll_loss_forward", "aten::nll_loss2d_forward")
_MEAN = 1
"""Number of the reduction "mean" (torch/nn/_reduction.py)."""


class ClassWeights:
    """Knows the weights of classes by which the losses of one run are averaged."""

    def __init__(self) -> None:
        self._seen: tuple[torch.Tensor, int] | None = None
        self.weights: tuple[Weight, ...] = ()
        """Weights of pieces that come into question: by all labels, and by those of next tokens."""

    def look(self, compute: Callable[[], object]) -> None:
        """See by which class weights a pass takes its mean, if it calls torch's cross-entropy."""
        with _Seen() as seen, torch.no_grad():
            compute()
        found = seen.found[0] if len(seen.found) == 1 else None
        if found is None or self._seen is None or not _is_same(found, self._seen):
            self._seen = found
            self.weights = _weights(*found) if found is not None else ()


def _is_same(one: tuple[torch.Tensor, int], other: tuple[torch.Tensor, int]) -> bool:
    return one[1] == other[1] and torch.equal(one[0], other[0])


def _weights(of_classes: torch.Tensor, ignored: int) -> tuple[Weight, ...]:
    def total(labels: torch.Tensor) -> float:
        labels = labels[labels != ignored].cpu()
        return float(of_classes[labels].sum())

    def by_labels(inputs: Inputs, _: int) -> float:
        return total(labels_of(inputs))

    def by_next_labels(inputs: Inputs, _: int) -> float:
        return total(labels_of(inputs)[..., 1:])

    name = "a mean that is weighted by class"
    return Weight(name, by_labels), Weight(f"{name}, over next tokens", by_next_labels)


class _Seen(TorchDispatchMode):
    """Sees the class weights, and the label that does not count, of each weighted mean."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[tuple[torch.Tensor, int]] = []

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> object:
        if getattr(getattr(func, "_schema", None), "name", "") in _WEIGHTED:
            _, _, weight, reduction, ignored = args
            if weight is not None and reduction == _MEAN:
                self.found.append((weight.detach().cpu().double(), ignored))
        return func(*args, **(kwargs or {}))
