"""Class weights: find those of a weighted cross-entropy, whose mean is divided by their sum."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trainer_plugins.survival.exact.shares import Inputs, Weight, labels_of

_WEIGHTED = ("aten::nll_loss_forward", "aten::nll_loss2d_forward")
_MEAN = 1  # number of the reduction "mean" (torch/nn/_reduction.py)


class _Mean(NamedTuple):
    of_classes: torch.Tensor
    ignored: int  # the label that does not count


class ClassWeights:
    """Knows the weights of classes in the mean of one run's loss."""

    def __init__(self) -> None:
        self._seen: _Mean | None = None
        self.weights: tuple[Weight, ...] = ()  # of pieces: by all labels, and by next tokens

    def look(self, compute: Callable[[], object]) -> None:
        """See which class weights a pass uses for its mean, if it calls torch's cross-entropy."""
        with _Seen() as seen, torch.no_grad():
            compute()
        found = seen.found[0] if len(seen.found) == 1 else None
        if found is None or self._seen is None or not _is_same(found, self._seen):
            self._seen = found
            self.weights = _weights(found) if found is not None else ()


def _is_same(one: _Mean, other: _Mean) -> bool:
    return one.ignored == other.ignored and torch.equal(one.of_classes, other.of_classes)


def _weights(mean: _Mean) -> tuple[Weight, ...]:
    def total(labels: torch.Tensor) -> float:
        labels = labels[labels != mean.ignored].cpu()
        return float(mean.of_classes[labels].sum())

    def by_labels(inputs: Inputs, _: int) -> float:
        return total(labels_of(inputs))

    def by_next_labels(inputs: Inputs, _: int) -> float:
        return total(labels_of(inputs)[..., 1:])

    name = "a mean that is weighted by class"
    return Weight(name, by_labels), Weight(f"{name}, over next tokens", by_next_labels)


class _Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[_Mean] = []

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> object:
        if getattr(getattr(func, "_schema", None), "name", "") in _WEIGHTED:
            _, _, weight, reduction, ignored = args
            if weight is not None and reduction == _MEAN:
                self.found.append(_Mean(weight.detach().cpu().double(), ignored))
        return func(*args, **(kwargs or {}))
