"""Explanation: causes in order, with evidence, and remedies, with where their effect is from."""

from dataclasses import dataclass
from typing import Literal

Certainty = Literal["certain", "likely", "possible"]
# From the planner for this run, the allocator's model over a snapshot, the numbers of the message,
# or from practice and not checked here.
Grade = Literal["predicted", "replayed", "arithmetic", "known"]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Answers why something ran out of memory."""

    subject: str  # what was read: a file, standard input, a run directory
    causes: tuple[Cause, ...]  # the first is the answer; empty if no OOM was found
    remedies: tuple[Remedy, ...]  # the first is the one to try first
    facts: tuple[str, ...] = ()  # what else is known: numbers, categories, the largest tensors
    unknown: tuple[str, ...] = ()  # what is not known, and why
