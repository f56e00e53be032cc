"""Findings: the one shape in which every part of the package says what it noticed."""

import logging
from dataclasses import dataclass
from enum import IntEnum

from trainer_plugins.printable import printable


class Severity(IntEnum):
    """How much a finding matters.

    The values are logging levels, so a finding logs at its own severity.
    """

    INFO = logging.INFO
    WARNING = logging.WARNING
    ERROR = logging.ERROR


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing noticed about a run, with the numbers that show it and the step that mends it."""

    code: str
    """Stable name in kebab case, to search for and to look up in `docs/findings.md`: `memory-pressure`."""

    severity: Severity
    summary: str
    """What is so, as one sentence without a full stop."""

    evidence: str
    """The numbers it rests on, with units."""

    remedy: str
    """What to change, named as the user writes it."""

    amount: float = 0.0
    """The one number it turns on, in its own unit. Only compared with itself: more is worse."""

    def __str__(self) -> str:
        return printable(f"[{self.code}] {self.summary} ({self.evidence}). {self.remedy}")

    def worse_than(self, other: "Finding") -> bool:
        """Whether it is worth saying again: a higher severity, or an amount at least a tenth larger."""
        return self.severity > other.severity or self.amount >= 1.1 * other.amount > 0
