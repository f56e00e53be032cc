"""Explanation: causes in order, with evidence, and remedies, with the source of their effect."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal, NamedTuple

from trainer_plugins.advice.entry import flags_in
from trainer_plugins.record.shown import Frame, Process
from trainer_plugins.units import count_in_words

Certainty = Literal["certain", "likely", "possible"]
# From the planner for this run, the allocator's model over a snapshot, the numbers of the message,
# or common practice, not checked here.
Grade = Literal["predicted", "replayed", "arithmetic", "known"]
GRADES: Mapping[Grade, str] = {
    "predicted": "predicted",
    "replayed": "replayed",
    "arithmetic": "by arithmetic",
    "known": "not checked",
}
# For a record: the error's words, the allocator and driver after it, the count of live tensors, the
# steps before it, the failing batch, the model's config, the arguments, the driver's list.
ShownBy = Literal[
    "message", "reading", "live tensors", "timeline", "batch", "config", "arguments", "processes",
    "main memory", "text", "snapshot",
]  # fmt: skip

_SHOWN_EVIDENCE = 2  # lines of a brief answer: the first, and the one with these words
_MOST_ALTERNATIVES = 2
_EQUATION, _NUMBERS = re.compile(r"^[\d.]+ [MG]iB = "), "asked for "
_EXPORT = re.compile(r"^export (\w+)=(\S+)")


class BriefLine(NamedTuple):
    """Holds a line of a brief answer, and its label."""

    label: str
    text: str

    def __str__(self) -> str:
        return f"{self.label:7}{self.text}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """Describes blocks on the card allocated from one stack, or a tensor and its holder."""

    num_bytes: int  # in total, as the allocator rounds them
    requested_bytes: int
    count: int = 1
    category: str = ""  # their use; empty if unknown
    place: str = ""  # the source line, or the holder: `MyCallback.outputs[0]`
    shape: tuple[int, ...] = ()
    frames: tuple[Frame, ...] = ()  # the innermost first, all that were recorded


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """Holds the numbers of the moment to explain; None is unknown. Sizes in bytes."""

    rank: int | None = None
    card: int | None = None  # its index, as the process counts
    card_name: str = ""
    stream: int | None = None
    pool: Literal["small", "large"] | None = None  # of the allocator
    call: str = ""  # the method that raised: `train`, `evaluate`
    moment: str = ""  # the phase of the run: `train`, `eval`, `save`
    part: str = ""  # of the step: `forward`, `backward`, `optimizer`, `loss`
    step: int | None = None  # as the Trainer counts; for a snapshot, steps within the trace
    event_index: int | None = None  # in the snapshot's trace of this card
    peak_event_index: int | None = None  # of the event after which most was allocated
    requested_bytes: int | None = None  # as the source states it
    rounded_bytes: int | None = None  # the block size that the allocator looks for
    capacity_bytes: int | None = None
    limit_bytes: int | None = None  # the limit of the process, if there was one
    free_bytes: int | None = None  # free memory of the card
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    unused_bytes: int | None = None  # reserved, but in no tensor
    others_bytes: int | None = None  # neither free nor torch's: other processes, libraries
    largest_gap_bytes: int | None = None  # the longest reserved and unused stretch
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    categories: Mapping[str, int] = field(default_factory=dict)  # the use of the memory
    allocations: tuple[Allocation, ...] = ()  # the ten largest
    frames: tuple[Frame, ...] = ()  # of the request, the innermost first
    processes: tuple[Process, ...] = ()  # on the card, as far as they are listed


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """Holds one number of a cause's evidence, from which its sentence is built."""

    name: str  # with its unit: `kept_bytes`, `live_fraction`; `num_rows` is a count
    value: int | float
    shown_by: ShownBy  # the source of the number
    sentence: int  # the index in `evidence` of the sentence that states it


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """Names one reason for an OOM, and its evidence."""

    code: str  # a stable name in kebab case, explained in `docs/explain.md`: `eval-logits`
    grade: Certainty  # `certain` follows from the numbers or words, `possible` is a guess
    summary: str  # what is wrong, as one sentence without a full stop
    evidence: tuple[str, ...]  # numbers, words and frames, each as one sentence
    doubt: str = ""  # the open question, and how to settle it; empty if there is none
    data: Mapping[str, int | float | str] = field(default_factory=dict)  # the evidence by name
    figures: tuple[Figure, ...] = ()  # the numbers of the evidence, in its order


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """Describes one remedy, as the user types it."""

    json_properties: ClassVar[tuple[str, ...]] = ("fits", "flags", "variables")

    do: str  # a flag, an `export` line or a command, ready to be copied
    effect: str  # its effect, in GiB if known, and why it helps in this case
    grade: Grade  # the source of the effect
    price: str = ""  # its cost in speed or exactness; empty if there is none
    cause: str = ""  # the code of the cause it addresses
    # The peak predicted by the planner, or replayed from the snapshot; None if neither.
    predicted_peak_bytes: int | None = None
    spare_bytes: int | None = None  # of the card at that peak; negative if too small

    @property
    def fits(self) -> bool | None:
        """Return whether the card is large enough with it; None if unknown."""
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
        """Return the effect, and in a second line the price."""
        effect = f"{self.effect[:1].upper()}{self.effect[1:]}."
        return f"{effect}\nCost: {self.price}." if self.price else effect


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Explains an out-of-memory error."""

    subject: str = ""  # the source: a file, standard input, a run directory
    causes: tuple[Cause, ...] = ()  # the first is the answer; empty if no OOM was found
    remedies: tuple[Remedy, ...] = ()  # the first is the one to try first
    facts: tuple[str, ...] = ()  # other known facts: numbers, categories, the largest tensors
    unknown: tuple[str, ...] = ()  # open questions, with the reason
    numbers: Numbers = field(default_factory=Numbers)
    before: Numbers | None = None  # of the earlier of two compared snapshots

    def _alternatives(self) -> tuple[Remedy, ...]:
        """Return one more remedy of the first cause, and one of the next if that is as possible."""
        first, *others = self.causes
        codes = {each.code for each in others} if first.grade != "certain" else set()
        same = [one for one in self.remedies[1:] if one.cause == first.code]
        other = [one for one in self.remedies[1:] if one.cause in codes]
        return (*same[:1], *other[:1], *same[1:])[:_MOST_ALTERNATIVES]

    def brief(self) -> Iterator[BriefLine]:
        """Yield the cause, its best evidence, the first remedies, and the question that decides."""
        first = self.causes[0]
        yield BriefLine("Cause", f"{first.summary}  [{first.grade}: {first.code}]")
        known = sorted(
            (*first.evidence[1:], *self.facts),
            key=lambda line: (not _EQUATION.search(line), _NUMBERS not in line),
        )
        evidence = (*first.evidence[:1], *known)
        for line in evidence[:_SHOWN_EVIDENCE]:
            yield BriefLine("", line)
        left = len(self.causes) - 1 + len(evidence[_SHOWN_EVIDENCE:])
        left += len(self.remedies[1:]) + len(self.unknown)
        if self.remedies:
            remedy = self.remedies[0]
            yield BriefLine("Try", remedy.do)
            yield from (BriefLine("", line) for line in remedy.words.splitlines())
            for one in self._alternatives():
                yield BriefLine("Or", one.do)
                if one.cause != first.code:
                    summary = next(each.summary for each in self.causes if each.code == one.cause)
                    yield BriefLine("", f"If {summary} ({one.cause}).")
        if first.doubt and first.grade == "possible":
            yield BriefLine("Check", f"{first.doubt}.")
        else:
            left += bool(first.doubt)
        if left:
            yield BriefLine("More", f"{count_in_words(left, 'line')}: --verbose")
