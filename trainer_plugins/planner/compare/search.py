"""Find the largest micro-batch that fits for each way to run; the effective batch stays the same.

Candidates that decide are probed from few layers (`foresight`), the best line is planned exactly.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trainer_plugins import checkpointing
from trainer_plugins.launch import configs
from trainer_plugins.planner import progress
from trainer_plugins.planner.cards import Card
from trainer_plugins.planner.compare.foresight import grown
from trainer_plugins.planner.compare.lines import (
    AS_GIVEN,
    ON_MANY,
    ON_ONE_CARD,
    STREAMED,
    WITH_CHECKPOINTING,
    SearchLine,
    SearchRequest,
    SearchResult,
    line_of,
)
from trainer_plugins.planner.compare.switches import source_of, with_base_streamed, with_flags
from trainer_plugins.planner.kind import cards_of_a_row, sizes_of
from trainer_plugins.planner.plan import MemoryPlan, NotPredicted, PlanError
from trainer_plugins.planner.request import GPUS_PER_NODE, PlanRequest
from trainer_plugins.planner.tried import is_safe, margin_bytes

_CERTAINLY = 1.1  # a candidate that seems to need this part of the card is not probed


@dataclass(frozen=True, slots=True)
class _Way:
    """Describes one way to run; its micro-batch is searched."""

    strategy: str
    launch_file: str | None
    gradient_checkpointing: bool
    sequence_length: int

    @property
    def name(self) -> str:
        """Return the strategy, and whether it is with checkpointing."""
        return f"{self.strategy}{WITH_CHECKPOINTING if self.gradient_checkpointing else ''}"

    @property
    def offloads(self) -> bool:
        """Return whether parts of the run are in main memory, which is slower."""
        return "offload" in self.strategy or self.strategy == STREAMED

    def is_refused_with(self, other: "_Way", error: PlanError) -> bool:
        """Return whether another way's error counts: checkpointing alone may make a run fail."""
        is_alike = other.gradient_checkpointing == self.gradient_checkpointing
        return other.strategy == self.strategy and (is_alike or isinstance(error, NotPredicted))

    def request(self, run: PlanRequest, micro_batch: int, rows: int) -> PlanRequest:
        changed = with_flags(
            run,
            per_device_train_batch_size=micro_batch,
            gradient_accumulation_steps=rows // micro_batch,
            **{checkpointing.NAME: self.gradient_checkpointing},
        )
        source = replace(source_of(changed), sequence_length=self.sequence_length)
        changed = replace(changed, source=source, launch_file=self.launch_file)
        return with_base_streamed(changed) if self.strategy == STREAMED else changed


Probe = Callable[[PlanRequest], MemoryPlan]  # predicts a run nearly
Predict = Callable[[PlanRequest], tuple[MemoryPlan, bool]]  # exactly; and whether all layers ran


def search(
    asked: SearchRequest,
    args: Any,
    probe: Probe,
    predict: Predict,
    show: Callable[[SearchLine], None] = lambda line: None,
) -> SearchResult:
    """Find the largest micro-batch of each way to run. Only for the subprocess of a prediction."""
    run, card = asked.run, asked.card
    if card is None:
        raise PlanError("--search needs a card that the run has to fit on: name one with --gpu")
    rows = args.per_device_train_batch_size * args.gradient_accumulation_steps
    if rows < 1 or min(asked.lengths, default=0) < 1:
        raise PlanError(
            f"a batch needs rows and tokens, got {rows} rows of "
            f"{min(asked.lengths, default=0)} tokens"
        )
    searched = _Search(run, card, rows, probe)
    ways = [*_ways(run, args, sorted(asked.lengths))]
    for number, way in enumerate(ways, 1):
        progress.part(f"searching way {number} of {len(ways)}, {way.name}")
        line = searched.line_of(way)
        if line is not None:
            show(line)
    reasons = {str(error): error for error in searched.refused.values()}
    if not searched.found and len(reasons) == 1:
        raise next(iter(reasons.values()))  # it is of the run, and not of a way
    best = searched.best(predict)
    return SearchResult(
        lines=tuple(searched.found.values()),
        best=best[0] if best else None,
        best_plan=best[1] if best else None,
        refused=tuple((way.name, str(error)) for way, error in searched.refused.items()),
        not_tried=tuple(searched.not_tried.items()),
        effective_batch=rows * run.num_gpus // cards_of_a_row(sizes_of(run, args)),
        num_gpus=run.num_gpus,
        gpu=card.name,
        capacity_bytes=card.capacity_bytes,
    )


def _ways(run: PlanRequest, args: Any, lengths: Sequence[int]) -> Iterator[_Way]:
    """Return all ways to run, those without offload first."""
    ways = [
        _Way(strategy, launch_file, gradient_checkpointing, length)
        for strategy, launch_file in _strategies(run, args)
        for gradient_checkpointing in (False, True)
        for length in lengths
    ]
    yield from sorted(ways, key=lambda way: way.offloads)


def _strategies(run: PlanRequest, args: Any) -> list[tuple[str, str | None]]:
    if (
        run.launch_file is not None
        or run.resident_layers is not None
        or getattr(args, "deepspeed", None)
        or getattr(args, "fsdp", None)
    ):
        return [(AS_GIVEN, run.launch_file)]
    shipped = configs.names()
    found: list[tuple[str, str | None]] = []
    if source_of(run).peft is not None:
        found.append((STREAMED, None))
    for name, has_file in ON_ONE_CARD if run.num_gpus == 1 else ON_MANY:
        wide = f"{name}_multinode"
        chosen = wide if run.num_gpus > GPUS_PER_NODE and wide in shipped else name
        found.append((chosen, str(configs.path(chosen)) if has_file else None))
    return found


class _Search:
    """Holds what a search has found; `rows` are those of a card between two optimizer steps."""

    def __init__(self, run: PlanRequest, card: Card, rows: int, probe: Probe) -> None:
        self._run, self._rows, self._probe = run, rows, probe
        self._room = card.capacity_bytes - card.context_bytes
        self._sizes = [size for size in range(1, rows + 1) if rows % size == 0]
        self.found: dict[_Way, SearchLine] = {}
        self.refused: dict[_Way, PlanError] = {}
        self.not_tried: dict[str, str] = {}

    def line_of(self, way: _Way) -> SearchLine | None:
        """Find the largest micro-batch of one way; None if it need not or cannot be predicted."""
        why = self._cannot_be_best(way)
        if why is not None:
            self.not_tried[way.name] = why
            return None
        if any(way.is_refused_with(other, error) for other, error in self.refused.items()):
            return None
        # longer rows need more memory
        most = min(
            (
                line.micro_batch
                for other, line in self.found.items()
                if replace(other, sequence_length=way.sequence_length) == way
            ),
            default=self._rows,
        )
        try:
            line = self.found[way] = self._largest(way, [n for n in self._sizes if n <= most])
        except PlanError as error:
            self.refused[way] = error
            return None
        return line

    def best(self, predict: Predict) -> tuple[SearchLine, MemoryPlan] | None:
        """Predict the best line exactly; while it does not fit then, with a smaller micro-batch."""
        while True:
            ways = [way for way in self.found if self.found[way].fits]
            if not ways:
                return None
            way = min(ways, key=self._rank)
            size, was_safe = self.found[way].micro_batch, self.found[way].is_safe
            progress.part(f"predicting the best: {way.name}, {size} rows")
            plan, in_full = predict(way.request(self._run, size, self._rows))
            line = self.found[way] = self._line(way, size, plan, in_full)
            if is_safe(plan) or (plan.fits and not was_safe):
                return line, plan
            smaller = [each for each in self._sizes if each < size]
            if smaller:
                self.found[way] = self._largest(way, smaller)

    def _rank(self, way: _Way) -> tuple[object, ...]:
        line = self.found[way]
        plainest = [*dict.fromkeys(way.strategy for way in self.found)]
        return (
            not line.is_safe,
            way.offloads,
            -line.micro_batch_tokens,
            way.gradient_checkpointing,
            plainest.index(way.strategy),
            -way.sequence_length,
        )

    def _cannot_be_best(self, way: _Way) -> str | None:
        safe = {other: line for other, line in self.found.items() if line.is_safe}
        if way.offloads and (without := next((each for each in safe if not each.offloads), None)):
            slower = "streaming the base" if way.strategy == STREAMED else "offload"
            return f"{slower} is slower, and {without.name} fits without it"
        plain = safe.get(replace(way, gradient_checkpointing=False))
        if way.gradient_checkpointing and plain and plain.micro_batch == self._rows:
            return "all rows at once fit without it"
        return None

    def _largest(self, way: _Way, sizes: Sequence[int]) -> SearchLine:
        """Find the largest safe size by bisection from a guess; if none is safe, the smallest."""
        smallest = self._probe(way.request(self._run, sizes[0], self._rows))
        best = self._line(way, sizes[0], smallest, False)
        if not best.is_safe:
            return best
        need = {size: grown(smallest, size / sizes[0]) for size in sizes}
        sizes = [size for size in sizes if need[size] < _CERTAINLY * self._room]
        usable = self._room - margin_bytes(self._room)
        low, high = 0, len(sizes) - 1
        middle = max((at for at, size in enumerate(sizes) if need[size] < usable), default=0) or 1
        while low < high:
            plan = self._probe(way.request(self._run, sizes[middle], self._rows))
            line = self._line(way, sizes[middle], plan, False)
            if line.is_safe:
                best, low = line, middle
            else:
                high = middle - 1
            middle = (low + high + 1) // 2
        return best

    def _line(self, way: _Way, micro_batch: int, plan: MemoryPlan, in_full: bool) -> SearchLine:
        return line_of(
            plan,
            strategy=way.strategy,
            gradient_checkpointing=way.gradient_checkpointing,
            sequence_length=way.sequence_length,
            micro_batch=micro_batch,
            rows=self._rows,
            in_full=in_full,
        )
