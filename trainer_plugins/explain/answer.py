"""Explanation: causes in order, with evidence, and remedies, with where their effect is from."""

from dataclasses import dataclass
from typing import Literal

Certainty = Literal["certain", "likely", "possible"]
Grade = Literal["predicted", "replayed", "arithmetic", "known"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """Names one reason for an OOM, and what shows it."""

    code: str  # a stable name in kebab case, explained in `docs/explain.md`: `eval-logits`
    grade: Certainty
    """How sure it is: `certain` follows from the numbers or words, `possible` is a guess."""

    summary: str  # what is wrong, as one sentence without a full stop
    evidence: tuple[str, ...]
    """The numbers, words and frames that it rests on, each as one sentence."""

    doubt: str = ""
    """What cannot be decided here, and what would settle it; empty if nothing is open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """Says one thing to do, as the user types it."""

    do: str  # a flag, an `export` line or a command, ready to be copied
    effect: str  # what it changes, in GiB where that is known, and why it helps this case
    grade: Grade
    """Where the effect comes from.

    `predicted` by the planner for this run, `replayed` by the allocator's model over a snapshot,
    `arithmetic` from the numbers of the message, `known` from practice and not checked here.
    """

    price: str = ""  # what it costs in speed or exactness; empty if nothing
    cause: str = ""  # the code of the cause that it answers


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Answers why something ran out of memory.

    `causes` is in order: the first is the answer, and is empty if no OOM was found. The first
    remedy is the one to try first.
    """

    subject: str  # what was read: a file, standard input, a run directory
    causes: tuple[Cause, ...]
    remedies: tuple[Remedy, ...]

    facts: tuple[str, ...] = ()
    """What else is known: the numbers of the message, categories, the largest tensors."""

    unknown: tuple[str, ...] = ()  # what is not known, and why
