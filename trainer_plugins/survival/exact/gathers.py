"""Gathers: holds back a trainer's exchanges of metrics between ranks in `compute_loss`.

Other ranks take part once per micro-batch. So we record the values that each piece would send, and
the last piece sends them together, each once: its code, and so the metrics, see the numbers of the
whole. Ranks that divide together exchange safely, on the CPU (`Together.exchanges`).
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch

from trainer_plugins.hf_trainer import HfTrainer
from trainer_plugins.oom import classify
from trainer_plugins.patched import Patches

_EXCHANGES = ("gather", "gather_for_metrics", "reduce")

Merge = Callable[[list[torch.Tensor], list[float]], torch.Tensor]
Exchange = Callable[..., torch.Tensor]


class Exchanging:
    """Exchanges as a process that divides alone; `survival.ranks` overrides the differences."""

    # This rank has failed, and only completes the collectives of a pass.
    is_finishing = False
    # Replacements for the accelerator's exchanges while a loss is computed, by name.
    exchanges: Mapping[str, Exchange] = {}

    def may_exchange(self) -> bool:
        """Decide, identically on every rank, whether to exchange the next metric. Collective."""
        return True


class Gathers:
    """Intercepts the exchanges of one Trainer's accelerator while its loss is computed."""

    def __init__(self, trainer: HfTrainer, ranks: Exchanging) -> None:
        self._trainer, self._ranks = trainer, ranks
        self._answers: list[torch.Tensor] = []  # for this micro-batch, in the order of the code
        self._pieces: list[tuple[float, list[torch.Tensor]]] = []  # share and values of each
        # Values of this piece, or of a failed one with collectives to complete; None: exchange.
        self._brought: list[torch.Tensor] | None = None
        self._share = 1.0
        self._merges: list[Merge] = []
        self._index = 0
        self._is_exchanging = False

    def begin(self) -> None:
        self._answers, self._pieces, self._brought = [], [], None

    def forget_pieces(self) -> None:
        self._pieces = []

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Intercept the accelerator's exchanges during one call of `compute_loss`."""
        self._index = 0
        accelerator = self._trainer.accelerator  # a search makes a new one for each trial
        if self._brought is None and not (self._pieces or accelerator.use_distributed):
            yield  # a single process gets its own value back
            return
        with Patches() as patches:
            for name in _EXCHANGES:
                exchange = self._ranks.exchanges.get(name) or getattr(accelerator, name)
                patches.set(accelerator, name, partial(self._exchange, exchange))
            yield

    @contextmanager
    def piece(self, share: float, is_last: bool, *, is_idle: bool = False) -> Iterator[None]:
        """Surround a piece, with its share of the micro-batch; the last one exchanges for all."""
        self._share, self._brought = share, None if is_last else []
        yield
        if self._brought is not None and not is_idle:
            self._pieces.append((share, self._brought))

    @contextmanager
    def apart(self, *, shows_metrics: bool = False) -> Iterator[None]:
        """Surround passes that reach no other rank and no log.

        If the last ones, a whole and its parts, show how metrics add up, learn it from them.
        """
        before, brought = self._brought, list[torch.Tensor]()
        self._brought = brought
        with Patches() as patches:
            patches.set(self._trainer, "log", lambda *_, **__: None)  # a loss may call it
            try:
                yield
            finally:
                self._brought = before
        num = self._index  # per pass
        if shows_metrics and 0 < 3 * num <= len(brought):
            last = brought[-3 * num :]
            self._merges = [_merge(*last[index::num]) for index in range(num)]

    def has_exchanged(self) -> bool:
        """Return whether a pass since this piece, or inside `apart`, would have exchanged."""
        return bool(self._brought)

    def _exchange(
        self, exchange: Exchange, value: torch.Tensor, *args: object, **options: object
    ) -> torch.Tensor:
        if self._is_exchanging:  # `gather_for_metrics` calls `gather`
            return exchange(value, *args, **options)
        index = self._index
        self._index += 1
        if self._brought is not None:
            self._brought.append(value.detach())
            return value  # the metrics of a piece are discarded
        if index < len(self._answers):
            return self._answers[index].to(value.device)
        if self._pieces and not self._ranks.is_finishing:
            shares = [*(share for share, _ in self._pieces), self._share]
            value = self._merges[index](
                [*(brought[index] for _, brought in self._pieces), value.detach()], shares
            )
        is_shared, device = self._trainer.accelerator.use_distributed, value.device
        if self._ranks.exchanges:
            value = value.detach().cpu()
        if not self._ranks.may_exchange():
            return value.to(device)  # a rank has failed: results from here on are discarded
        self._is_exchanging = True
        try:
            answer = exchange(value, *args, **options)
        except RuntimeError as error:
            if not (is_shared and classify(error)):
                raise
            raise RuntimeError(
                "survive_oom could not help: it failed while ranks exchanged a metric, and it is "
                f"not known whether the others have received it ({error})"
            ) from None
        finally:
            self._is_exchanging = False
        if is_shared:  # a single process gets its own value back, with its graph
            self._answers.append(answer)
        return answer.to(device)


def _merge(whole: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> Merge:
    """Determine how values of parts become the whole's: concatenated, summed or averaged."""
    if whole.dim() and len(whole) == len(first) + len(second):
        return lambda values, _: torch.cat(values)
    # Zeros fit both. Counts are sums; other zeros are more likely means (no answer was right).
    is_sum = bool(whole.any()) and torch.allclose(whole, first + second, rtol=0.05, atol=0)
    if is_sum or not whole.is_floating_point():
        return lambda values, _: torch.stack(values).sum(0)
    return _mean


def _mean(values: list[torch.Tensor], shares: list[float]) -> torch.Tensor:
    weighted = [value * share for value, share in zip(values, shares, strict=True)]
    return torch.stack(weighted).sum(0) / sum(shares)
