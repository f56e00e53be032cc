"""Explanation: causes in order, with evidence, and remedies, with where their effect is from."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal, NamedTuple, TypedDict

from trainer_plugins.advice.entry import flags_in
from trainer_plugins.record.oom_record import Frame, Process

Certainty = Literal["certain", "likely", "possible"]
# From the planner for this run, the allocator's model over a snapshot, the numbers of the message,
# or from practice and not checked here.
Grade = Literal["predicted", "replayed", "arithmetic", "known"]
GRADES: Mapping[Grade, str] = {
    "predicted": "predicted",
    "replayed": "replayed",
    "arithmetic": "by arithmetic",
    "known": "not checked",
}
# Of a record: the error's words, the allocator and driver after it, the count of what was alive,
# the steps before it, the failing batch, the model's config, the arguments, the driver's list.
ShownBy = Literal[
    "message", "reading", "live tensors", "timeline", "batch", "config", "arguments", "processes",
    "main memory", "text", "snapshot",
]  # fmt: skip

_SHOWN_EVIDENCE = 2  # lines of a brief answer: the first, and the one with these words
_EQUATION, _NUMBERS = re.compile(r"^[\d.]+ [MG]iB = "), "asked for "
_EXPORT = re.compile(r"^export (\w+)=(\S+)")


class BriefLine(NamedTuple):
    """Holds a line of a brief answer, and the word before it."""

    label: str
    text: str

    def __str__(self) -> str:
        return f"{self.label:5}{self.text}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """Describes blocks on the card that one stack asked for, or a tensor that something holds."""

    num_bytes: int  # of all of them, as the allocator rounds them
    requested_bytes: int
    count: int = 1
    category: str = ""  # what they are for; empty if unknown
    place: str = ""  # the source line, or what holds it: `MyCallback.outputs[0]`
    shape: tuple[int, ...] = ()
    frames: tuple[Frame, ...] = ()  # the innermost first, all that were recorded


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """Holds the numbers of the moment that is explained; None is not known. Sizes in bytes."""

    rank: int | None = None
    card: int | None = None  # its index, as the process counts
    card_name: str = ""
    stream: int | None = None
    pool: Literal["small", "large"] | None = None  # of the allocator
    call: str = ""  # the method that raised: `train`, `evaluate`
    moment: str = ""  # what the run was doing: `train`, `eval`, `save`
    part: str = ""  # of the step: `forward`, `backward`, `optimizer`, `loss`
    step: int | None = None  # as the Trainer counts; of a snapshot, steps within the trace
    event_index: int | None = None  # in the snapshot's trace of this card
    peak_event_index: int | None = None  # after which most was allocated
    requested_bytes: int | None = None  # as the source states it
    rounded_bytes: int | None = None  # the block that the allocator looks for
    capacity_bytes: int | None = None
    limit_bytes: int | None = None  # what the process may use, if it was limited
    free_bytes: int | None = None  # what the card had left
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    unused_bytes: int | None = None  # reserved, and in no tensor
    others_bytes: int | None = None  # neither free nor torch's: other processes, libraries
    largest_gap_bytes: int | None = None  # the longest stretch that was reserved and unused
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    categories: Mapping[str, int] = field(default_factory=dict)  # what the memory was for
    allocations: tuple[Allocation, ...] = ()  # the ten largest
    frames: tuple[Frame, ...] = ()  # of the request, the innermost first
    processes: tuple[Process, ...] = ()  # on the card, as far as they are named


class Stated(TypedDict):
    """Holds those of `Numbers` that an error or a reading states, for the sentences on it."""

    requested_bytes: int | None
    capacity_bytes: int | None
    limit_bytes: int | None
    free_bytes: int | None
    allocated_bytes: int | None
    reserved_bytes: int | None
    unused_bytes: int | None
    others_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """Holds one number of a cause's evidence; the sentence that states it is made of it."""

    name: str  # with its unit: `kept_bytes`, `live_fraction`; `num_rows` is a count
    value: int | float
    shown_by: ShownBy  # what it was read from
    sentence: int  # which of `evidence` states it; the first is 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """Names one reason for an OOM, and what shows it."""

    code: str  # a stable name in kebab case, explained in `docs/explain.md`: `eval-logits`
    grade: Certainty  # `certain` follows from the numbers or words, `possible` is a guess
    summary: str  # what is wrong, as one sentence without a full stop
    evidence: tuple[str, ...]  # numbers, words and frames, each as one sentence
    doubt: str = ""  # what cannot be decided here, and what would settle it; empty if nothing
    data: Mapping[str, int | float | str] = field(default_factory=dict)  # the evidence, by name
    figures: tuple[Figure, ...] = ()  # the numbers of the evidence, in its order


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """Says one thing to do, as the user types it."""

    json_properties: ClassVar[tuple[str, ...]] = ("fits", "flags", "variables")

    do: str  # a flag, an `export` line or a command, ready to be copied
    effect: str  # what it changes, in GiB where that is known, and why it helps this case
    grade: Grade  # where the effect comes from
    price: str = ""  # what it costs in speed or exactness; empty if nothing
    cause: str = ""  # the code of the cause that it answers
    # What the planner predicts for the run with it, or the replay of the snapshot; None: nothing.
    predicted_peak_bytes: int | None = None
    spare_bytes: int | None = None  # of the card at that peak; negative if it is short

    @property
    def fits(self) -> bool | None:
        """Return whether the card is large enough with it; None if that is not known."""
        return None if self.spare_bytes is None else self.spare_bytes >= 0

    @property
    def flags(self) -> Mapping[str, str]:
        """Return its flags with their values; empty if it is something else."""
        return flags_in(self.do)

    @property
    def variables(self) -> Mapping[str, str]:
        """Return the environment variables that it sets; empty if it is something else."""
        return {found[1]: found[2]} if (found := _EXPORT.match(self.do)) else {}

    @property
    def words(self) -> str:
        """Return the effect and the price as one line."""
        return f"{self.effect}; it costs: {self.price}" if self.price else self.effect


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Answers why something ran out of memory."""

    subject: str  # what was read: a file, standard input, a run directory
    causes: tuple[Cause, ...]  # the first is the answer; empty if no OOM was found
    remedies: tuple[Remedy, ...]  # the first is the one to try first
    facts: tuple[str, ...] = ()  # what else is known: numbers, categories, the largest tensors
    unknown: tuple[str, ...] = ()  # what is not known, and why
    numbers: Numbers = field(default_factory=Numbers)
    before: Numbers | None = None  # of the first of two snapshots that are compared

    def brief(self) -> Iterator[BriefLine]:
        """Yield the cause, what shows it best, and what to do first; and how much more is known."""
        first = self.causes[0]
        yield BriefLine("Why", f"{first.summary}  [{first.grade}: {first.code}]")
        known = sorted(
            (*first.evidence[1:], *self.facts),
            key=lambda line: (not _EQUATION.search(line), _NUMBERS not in line),
        )
        evidence = (*first.evidence[:1], *known)
        for line in evidence[:_SHOWN_EVIDENCE]:
            yield BriefLine("", line)
        left = len(self.causes) - 1 + len(evidence[_SHOWN_EVIDENCE:])
        left += len(self.remedies[1:]) + len(self.unknown) + bool(first.doubt)
        more = f" (more: --verbose, {left} line{'s' if left > 1 else ''})" if left else ""
        if not self.remedies:
            yield BriefLine("", f"no remedy is known here{more}")
            return
        remedy = self.remedies[0]
        yield BriefLine("Do", remedy.do)
        yield BriefLine("", f"  {remedy.words}{more}")
