"""Finding: how every part of the package reports a problem."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, TypedDict

from trainer_plugins.printable import printable

Data = Mapping[str, int | float | str]

if TYPE_CHECKING:
    from typing_extensions import NotRequired, Unpack

    class _Fields(TypedDict):  # of a finding, without its severity
        code: str
        summary: str
        evidence: str
        remedy: str
        amount: NotRequired[float]
        data: NotRequired[Data]


class Severity(IntEnum):
    """Ranks findings; the values are logging levels, so a finding logs at its own severity."""

    INFO = logging.INFO
    WARNING = logging.WARNING
    ERROR = logging.ERROR


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Reports one problem of a run: what is wrong, the numbers that show it, what to change.

    >>> words = dict(summary="memory grows", evidence="9 MiB/step", remedy="Detach it")
    >>> print(Finding.warning(code="leak-tensors", **words))
    [leak-tensors] memory grows (9 MiB/step). Detach it
    """

    code: str  # a stable name in kebab case, explained in `docs/findings.md`: `memory-pressure`
    severity: Severity
    summary: str  # what is wrong, as one sentence without a full stop
    evidence: str  # the numbers that show it, with units
    remedy: str  # the change to make, in names that the user types: arguments, flags, variables
    amount: float = 0.0  # its severity as a number, comparable only between findings of one code
    data: Data = field(default_factory=dict, hash=False)  # the evidence by name: `stuck_bytes`

    @classmethod
    def error(cls, **fields: "Unpack[_Fields]") -> "Finding":
        """Report a problem that ends a run, or makes its result useless."""
        return cls(severity=Severity.ERROR, **fields)

    @classmethod
    def warning(cls, **fields: "Unpack[_Fields]") -> "Finding":
        """Report a problem that may end a run, or wastes memory or time."""
        return cls(severity=Severity.WARNING, **fields)

    def __str__(self) -> str:
        return printable(f"[{self.code}] {self.summary} ({self.evidence}). {self.remedy}")

    def worse_than(self, other: "Finding") -> bool:
        """Return whether to report it again: higher severity, or an amount at least 10% up."""
        return self.severity > other.severity or self.amount >= 1.1 * other.amount > 0
