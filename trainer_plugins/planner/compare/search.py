"""Find the largest micro-batch that fits for each way to run; the effective batch stays the same.

A micro-batch is a divisor of the rows that one card has between two optimizer steps, so that
accumulation makes up for it exactly. Candidates are predicted from few layers (`extrapolate`) if
that is proven to be the same, and the best one in full.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from trainer_plugins.launch import configs
from trainer_plugins.planner.cards import Card
from trainer_plugins.planner.plan import MemoryPlan, PlanError
from trainer_plugins.planner.request import ConfigSource, PlanRequest

_CARDS_OF_A_MACHINE = 8

# Shipped launch files, the plainest first; False: no file is needed, the flags alone do it.
_ON_ONE_CARD = (("single_device", False), ("one_gpu_7b_offload", True))
_ON_MANY = (
    ("ddp", False),
    ("fsdp2", True),
    ("fsdp2_offload", True),
    ("zero2", True),
    ("zero3", True),
    ("zero3_offload_optimizer", True),
    ("zero3_offload_all", True),
)
AS_GIVEN = "as given"
"""The name for the strategy of a run that brings its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchRequest:
    """Describes a search that starts from one run."""

    run: PlanRequest
    """The run; its rows and accumulation give the effective batch."""

    lengths: tuple[int, ...]
    """The lengths to try, in tokens."""

    @property
    def num_ways(self) -> int:
        """Return how many ways to run are tried at most."""
        return 2 * len(self.lengths) * len(_ON_ONE_CARD if self.run.num_gpus <= 1 else _ON_MANY)

    @property
    def device(self) -> str:
        """Return the type of device that is planned for."""
        return self.run.device

    @property
    def card(self) -> Card | None:
        """Return the card on which the run has to fit."""
        return self.run.card


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchLine:
    """Holds one way to run with the largest micro-batch that fits, or with the smallest of all.

    Sizes in bytes.
    """

    strategy: str
    """The name of a shipped launch file, or `AS_GIVEN`."""

    gradient_checkpointing: bool
    sequence_length: int
    micro_batch: int
    """Rows of one forward pass on one card (`per_device_train_batch_size`)."""

    accumulation_steps: int
    fits: bool
    allocated_peak_bytes: int
    reserved_peak_bytes: int
    nvidia_smi_peak_bytes: int
    margin_bytes: int
    host_ram_bytes_per_node: int
    in_full: bool
    """Whether all layers were run for these figures; else they are extrapolated from few layers."""

    @property
    def micro_batch_tokens(self) -> int:
        """Return the tokens of one forward pass on one card."""
        return self.micro_batch * self.sequence_length

    @property
    def arguments(self) -> dict[str, object]:
        """Return the TrainingArguments that select this way to run."""
        return {
            "per_device_train_batch_size": self.micro_batch,
            "gradient_accumulation_steps": self.accumulation_steps,
            "gradient_checkpointing": self.gradient_checkpointing,
        }

    @property
    def flags(self) -> str:
        """Return the same arguments as flags."""
        return " ".join(f"--{name} {value}" for name, value in self.arguments.items())

    @property
    def hydra_overrides(self) -> str:
        """Return the same for a Hydra app that has its TrainingArguments at `trainer.args`."""
        return " ".join(
            f"++trainer.args.{name}={str(value).lower()}" for name, value in self.arguments.items()
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """Holds the result of a search."""

    lines: tuple[SearchLine, ...]
    """Each way to run that can be predicted, in the order in which they were tried."""

    best: SearchLine | None
    """The line that fits and has the most tokens in one forward pass; None if nothing fits.

    Of equals: without checkpointing, then the plainest strategy, then the longest rows.
    """

    best_plan: MemoryPlan | None
    refused: tuple[tuple[str, str], ...]
    """Strategies that cannot be predicted, each with the reason."""

    effective_batch: int
    """Rows between two optimizer steps on all cards, the same in each line."""

    num_gpus: int
    gpu: str
    capacity_bytes: int

    def to_dict(self) -> dict[str, object]:
        """Return the result for JSON, with flags and overrides to copy for the best line."""
        found = asdict(self)
        if self.best is not None:
            copies = {"flags": self.best.flags, "hydra_overrides": self.best.hydra_overrides}
            found["best"] = {**found["best"], **copies}
        return found

    @classmethod
    def from_dict(cls, found: dict[str, Any]) -> "SearchResult":
        """Read what `to_dict` wrote."""
        import json

        best = {
            name: value
            for name, value in (found["best"] or {}).items()
            if name not in ("flags", "hydra_overrides")
        }
        plan = found["best_plan"]
        return cls(
            **{
                **found,
                "lines": tuple(SearchLine(**line) for line in found["lines"]),
                "best": SearchLine(**best) if best else None,
                "best_plan": MemoryPlan.from_json(json.dumps(plan)) if plan else None,
                "refused": tuple((name, reason) for name, reason in found["refused"]),
            }
        )


@dataclass(frozen=True, slots=True)
class _Way:
    """Describes one way to run; its micro-batch is searched."""

    strategy: str
    launch_file: str | None
    gradient_checkpointing: bool
    sequence_length: int

    def request(self, run: PlanRequest, micro_batch: int, rows: int) -> PlanRequest:
        assert isinstance(run.source, ConfigSource)
        assert isinstance(run.source.arguments, tuple)
        changed = {
            "per_device_train_batch_size": micro_batch,
            "gradient_accumulation_steps": rows // micro_batch,
            "gradient_checkpointing": self.gradient_checkpointing,
        }
        # of a flag given twice, the last one counts
        flags = [text for name, value in changed.items() for text in (f"--{name}", str(value))]
        arguments = (*run.source.arguments, *flags)
        source = replace(run.source, arguments=arguments, sequence_length=self.sequence_length)
        return replace(run, source=source, launch_file=self.launch_file)


Foresee = Callable[[PlanRequest], tuple[MemoryPlan, bool]]
"""Predicts a run, fast if that is proven, and returns also whether all layers were run."""


def search(
    asked: SearchRequest, args: Any, foresee: Foresee, predict: Callable[[PlanRequest], MemoryPlan]
) -> SearchResult:
    """Find the largest micro-batch of each way to run. Only for the subprocess of a prediction.

    Args:
        asked: what to search.
        args: the TrainingArguments of its run.
        foresee: predicts the candidates.
        predict: predicts the best one in full.

    Raises:
        PlanError: no card was named, or no way to run can be predicted.
    """
    run, card = asked.run, asked.card
    if card is None:
        raise PlanError("--search needs a card that the run has to fit on: name one with --gpu")
    rows = args.per_device_train_batch_size * args.gradient_accumulation_steps
    if rows < 1 or min(asked.lengths, default=0) < 1:
        raise PlanError(
            f"a batch needs rows and tokens, got {rows} rows of "
            f"{min(asked.lengths, default=0)} tokens"
        )
    sizes = [size for size in range(1, rows + 1) if rows % size == 0]
    found: dict[_Way, SearchLine] = {}
    refused: dict[tuple[str, str], PlanError] = {}
    for strategy, launch_file in _strategies(run, args):
        for gradient_checkpointing in (False, True):
            candidates = sizes
            for length in sorted(asked.lengths):
                way = _Way(strategy, launch_file, gradient_checkpointing, length)
                try:
                    line = found[way] = _largest(way, run, candidates, rows, foresee)
                except PlanError as error:
                    refused[strategy, str(error)] = error
                    break
                # longer rows need more memory
                candidates = [size for size in candidates if size <= line.micro_batch]
    if not found:
        raise next(iter(refused.values()))
    best = _best(found, run, sizes, rows, foresee, predict)
    return SearchResult(
        lines=tuple(found.values()),
        best=best[0] if best else None,
        best_plan=best[1] if best else None,
        refused=tuple(refused),
        effective_batch=rows * run.num_gpus,
        num_gpus=run.num_gpus,
        gpu=card.name,
        capacity_bytes=card.capacity_bytes,
    )


def _strategies(run: PlanRequest, args: Any) -> list[tuple[str, str | None]]:
    if (
        run.launch_file is not None
        or getattr(args, "deepspeed", None)
        or getattr(args, "fsdp", None)
    ):
        return [(AS_GIVEN, run.launch_file)]
    shipped = configs.names()
    found: list[tuple[str, str | None]] = []
    for name, has_file in _ON_ONE_CARD if run.num_gpus == 1 else _ON_MANY:
        wide = f"{name}_multinode"
        chosen = wide if run.num_gpus > _CARDS_OF_A_MACHINE and wide in shipped else name
        found.append((chosen, str(configs.path(chosen)) if has_file else None))
    return found


def _largest(
    way: _Way, run: PlanRequest, sizes: Sequence[int], rows: int, foresee: Foresee
) -> SearchLine:
    """Bisect, because a larger micro-batch needs more memory. If none fits, return the smallest."""
    first = _line(way, sizes[0], rows, *foresee(way.request(run, sizes[0], rows)))
    if not first.fits:
        return first
    best, low, high = first, 0, len(sizes) - 1
    while low < high:
        middle = (low + high + 1) // 2
        line = _line(way, sizes[middle], rows, *foresee(way.request(run, sizes[middle], rows)))
        if line.fits:
            best, low = line, middle
        else:
            high = middle - 1
    return best


def _best(
    found: dict[_Way, SearchLine],
    run: PlanRequest,
    sizes: Sequence[int],
    rows: int,
    foresee: Foresee,
    predict: Callable[[PlanRequest], MemoryPlan],
) -> tuple[SearchLine, MemoryPlan] | None:
    """Predict the best line in full.

    If it does not fit then, its micro-batch is reduced until it does, and another line may be best.
    """
    order = sorted(found, key=lambda way: -way.sequence_length)
    plainest = [*dict.fromkeys(way.strategy for way in found)]
    while True:
        ways = [way for way in order if found[way].fits]
        if not ways:
            return None
        way = min(
            ways,
            key=lambda way: (
                -found[way].micro_batch_tokens,
                way.gradient_checkpointing,
                plainest.index(way.strategy),
            ),
        )
        size = found[way].micro_batch
        plan = predict(way.request(run, size, rows))
        found[way] = _line(way, size, rows, plan, True)
        if plan.fits:
            return found[way], plan
        smaller = [each for each in sizes if each < size]
        if smaller:
            found[way] = _largest(way, run, smaller, rows, foresee)


def _line(way: _Way, micro_batch: int, rows: int, plan: MemoryPlan, in_full: bool) -> SearchLine:
    return SearchLine(
        strategy=way.strategy,
        gradient_checkpointing=way.gradient_checkpointing,
        sequence_length=way.sequence_length,
        micro_batch=micro_batch,
        accumulation_steps=rows // micro_batch,
        fits=bool(plan.fits),
        allocated_peak_bytes=plan.allocated_peak_bytes,
        reserved_peak_bytes=plan.reserved_peak_bytes,
        nvidia_smi_peak_bytes=plan.nvidia_smi_peak_bytes,
        margin_bytes=plan.margin_bytes or 0,
        host_ram_bytes_per_node=plan.host_ram_bytes_per_node,
        in_full=in_full,
    )
