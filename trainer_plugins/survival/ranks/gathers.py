"""Gathers: what a trainer's own code exchanges between ranks inside `compute_loss`, for its metrics.

The other ranks take part in each exchange once a micro-batch, with the value of a whole one. So
where a micro-batch is computed in pieces, what each piece brings is noted, and the last one sends
all of it together; and what an attempt that failed later has exchanged is not exchanged again. The
code of the last piece then sees the numbers of the whole, and its metrics are those of the whole:
also in one process, which exchanges with itself.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from transformers import Trainer

from trainer_plugins.oom import classify

_EXCHANGES = ("gather", "gather_for_metrics", "reduce")

Merge = Callable[[list[torch.Tensor], list[float]], torch.Tensor]


class Gathers:
    """Of one run."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._answers: list[Any] = []
        """What the exchanges of this micro-batch returned, in the order in which the code makes them."""
        self._pieces: list[tuple[float, list[torch.Tensor]]] = []
        """The share of each piece that is done, and what it brought."""
        self._brought: list[torch.Tensor] | None = None
        """The same of the one that is being computed; None where it exchanges."""
        self._share = 1.0
        self._merges: list[Merge] = []
        self._index = 0
        self._is_exchanging = False

    @property
    def _accelerator(self) -> Accelerator:
        """The one of now: a search makes a new one for each trial."""
        return self._trainer.accelerator

    def begin(self) -> None:
        """A micro-batch begins."""
        self._answers, self._pieces = [], []

    def forget_pieces(self) -> None:
        """What pieces have brought is brought again, by the whole."""
        self._pieces = []

    @contextmanager
    def held(self) -> Iterator[None]:
        """Around a call of `compute_loss`: for so long, and no longer, the accelerator's exchanges come here."""
        before = {name: vars(self._accelerator).get(name) for name in _EXCHANGES}
        self._index = 0
        for name in _EXCHANGES:
            setattr(
                self._accelerator, name, partial(self._exchange, getattr(self._accelerator, name))
            )
        try:
            yield
        finally:
            for name, replaced in before.items():
                delattr(self._accelerator, name)
                if replaced is not None:
                    setattr(self._accelerator, name, replaced)

    @contextmanager
    def piece(self, share: float, is_last: bool) -> Iterator[None]:
        """Around forward and backward of a piece, which is so much of its micro-batch."""
        self._share, self._brought = share, None if is_last else []
        try:
            yield
            if self._brought is not None:
                self._pieces.append((share, self._brought))
        finally:
            self._brought = None

    @contextmanager
    def apart(self) -> Iterator[list[torch.Tensor]]:
        """Around passes that are none of the training's: they reach no other rank.

        Gives what they would have sent.
        """
        brought: list[torch.Tensor] = []
        self._brought = brought
        try:
            yield brought
        finally:
            self._brought = None

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Around a measurement.

        One whose last passes are a probe and its two parts shows how values add up.
        """
        with self.apart() as brought:
            yield
        num = self._index  # in each pass
        if 0 < 3 * num <= len(brought):
            last = brought[-3 * num :]
            self._merges = [_merge(*last[index::num]) for index in range(num)]

    def _exchange(
        self, exchange: Callable[..., Any], value: Any, *args: Any, **options: Any
    ) -> Any:
        if self._is_exchanging:  # `gather_for_metrics` calls `gather`
            return exchange(value, *args, **options)
        index = self._index
        self._index += 1
        if self._brought is not None:
            self._brought.append(value.detach())
            return value  # what is made of it is thrown away
        if index < len(self._answers):
            return self._answers[index]
        if self._pieces:
            shares = [*(share for share, _ in self._pieces), self._share]
            value = self._merges[index](
                [*(brought[index] for _, brought in self._pieces), value.detach()], shares
            )
        is_shared = self._accelerator.use_distributed
        self._is_exchanging = True
        try:
            answer = exchange(value, *args, **options)
        except RuntimeError as error:
            if not (is_shared and classify(error)):
                raise
            said = f"it failed while ranks exchanged a metric, and whether the others have had it is not known ({error})"
        else:
            if is_shared:  # one process gets back what it gave, and the graph with it
                self._answers.append(answer)
            return answer
        finally:
            self._is_exchanging = False
        raise RuntimeError(f"survive_oom could not help: {said}")


def _merge(whole: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> Merge:
    """How values become that of the whole: one behind the other, as a sum, or as a mean."""
    if whole.dim() and len(whole) == len(first) + len(second):
        return _behind_each_other
    # Zeros would be both. Counts are sums; of other numbers, zeros are more likely means (no answer
    # was right).
    is_sum = bool(whole.any()) and torch.allclose(whole, first + second, rtol=0.05, atol=0)
    return _sum if is_sum or not whole.is_floating_point() else _mean


def _behind_each_other(values: list[torch.Tensor], _: list[float]) -> torch.Tensor:
    return torch.cat(values)


def _sum(values: list[torch.Tensor], _: list[float]) -> torch.Tensor:
    return torch.stack(values).sum(0)


def _mean(values: list[torch.Tensor], shares: list[float]) -> torch.Tensor:
    return torch.stack([value * share for value, share in zip(values, shares, strict=True)]).sum(
        0
    ) / sum(shares)
