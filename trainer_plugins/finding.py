"""Finding: the one form in which every part of the package reports what it noticed."""

import logging
from dataclasses import asdict, dataclass
from enum import IntEnum

from trainer_plugins.printable import printable


class Severity(IntEnum):
    """Says how much a finding matters.

    The values are logging levels, so a finding logs at its own severity.
    """

    INFO = logging.INFO
    WARNING = logging.WARNING
    ERROR = logging.ERROR


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Reports one problem of a run: what is so, the numbers that show it, and what to change."""

    code: str
    """A stable name in kebab case, explained in `docs/findings.md`: `memory-pressure`."""

    severity: Severity
    summary: str
    """What is wrong, as one sentence without a full stop."""

    evidence: str
    """The numbers it rests on, with units."""

    remedy: str
    """What to change, by the names that the user writes (arguments, flags, variables)."""

    amount: float = 0.0
    """The number that decides, in its own unit; compared only with the same code's: more is worse.
    """

    @classmethod
    def error(
        cls, *, code: str, summary: str, evidence: str, remedy: str, amount: float = 0.0
    ) -> "Finding":
        """Report what ends a run, or makes its result useless."""
        return cls(
            code=code,
            severity=Severity.ERROR,
            summary=summary,
            evidence=evidence,
            remedy=remedy,
            amount=amount,
        )

    @classmethod
    def warning(
        cls, *, code: str, summary: str, evidence: str, remedy: str, amount: float = 0.0
    ) -> "Finding":
        """Report what may end a run, or wastes memory or time."""
        return cls(
            code=code,
            severity=Severity.WARNING,
            summary=summary,
            evidence=evidence,
            remedy=remedy,
            amount=amount,
        )

    def __str__(self) -> str:
        return printable(f"[{self.code}] {self.summary} ({self.evidence}). {self.remedy}")

    def as_json(self) -> dict[str, object]:
        """Return its fields for JSON, the severity by name."""
        return {**asdict(self), "severity": self.severity.name}

    def worse_than(self, other: "Finding") -> bool:
        """Return whether it is worth repeating: higher severity, or an amount up by a tenth."""
        return self.severity > other.severity or self.amount >= 1.1 * other.amount > 0
