"""Explanation: causes in order, with evidence, and remedies, with where their effect is from."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

Certainty = Literal["certain", "likely", "possible"]
# From the planner for this run, the allocator's model over a snapshot, the numbers of the message,
# or from practice and not checked here.
Grade = Literal["predicted", "replayed", "arithmetic", "known"]

_SHOWN_EVIDENCE = 2  # lines of a brief answer: the first, and the one with these words
_NUMBERS = "asked for "


class BriefLine(NamedTuple):
    """Holds a line of a brief answer, and the word before it."""

    label: str
    text: str

    def __str__(self) -> str:
        return f"{self.label:5}{self.text}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """Names one reason for an OOM, and what shows it."""

    code: str  # a stable name in kebab case, explained in `docs/explain.md`: `eval-logits`
    grade: Certainty  # `certain` follows from the numbers or words, `possible` is a guess
    summary: str  # what is wrong, as one sentence without a full stop
    evidence: tuple[str, ...]  # numbers, words and frames, each as one sentence
    doubt: str = ""  # what cannot be decided here, and what would settle it; empty if nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """Says one thing to do, as the user types it."""

    do: str  # a flag, an `export` line or a command, ready to be copied
    effect: str  # what it changes, in GiB where that is known, and why it helps this case
    grade: Grade  # where the effect comes from
    price: str = ""  # what it costs in speed or exactness; empty if nothing
    cause: str = ""  # the code of the cause that it answers

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

    def brief(self) -> Iterator[BriefLine]:
        """Yield the cause, what shows it best, and what to do first; and how much more is known."""
        first = self.causes[0]
        yield BriefLine("Why", f"{first.summary}  [{first.grade}: {first.code}]")
        known = sorted((*first.evidence[1:], *self.facts), key=lambda line: _NUMBERS not in line)
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
