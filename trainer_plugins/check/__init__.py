"""Check a run before step 1: facts are gathered in one place, and judged by pure functions.

To add a check, write a pure function from facts to a line, and put it into the `CHECKS` of its
file. Its input is a field in `trainer_plugins/check/facts.py`, filled by each `gather_` file that
can read it. `docs/check.md` and `docs/findings.md` explain it, and `tests/check/` plants its fault.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from trainer_plugins.check import arguments, data, environment, machine, main_memory, model, planned
from trainer_plugins.check.facts import Check, CheckLine, Facts, Notes
from trainer_plugins.finding import Finding, Severity

_GROUPS: tuple[tuple[str, tuple[Check, ...]], ...] = (
    ("machine", machine.CHECKS),
    ("main memory", main_memory.CHECKS),
    ("plan", planned.CHECKS),
    ("model", (*model.CHECKS, *data.CHECKS)),
    ("arguments", arguments.CHECKS),
    ("environment", environment.CHECKS),
)


@dataclass(frozen=True, slots=True)
class Checklist:
    """Holds the observations and findings of all checks, by group."""

    json_properties: ClassVar[tuple[str, ...]] = ("worst",)

    groups: Mapping[str, tuple[CheckLine, ...]]

    @property
    def findings(self) -> tuple[Finding, ...]:
        found = [each for lines in self.groups.values() for line in lines for each in line.findings]
        return tuple(sorted(dict.fromkeys(found), key=lambda finding: -finding.severity))

    @property
    def worst(self) -> Severity:
        """Return the highest severity; INFO if nothing was found."""
        return max((finding.severity for finding in self.findings), default=Severity.INFO)


def judge(facts: Facts) -> Checklist:
    """Run every check whose facts are known. Takes milliseconds, and never raises."""
    groups: dict[str, tuple[CheckLine, ...]] = {}
    notes = Notes(facts.failed)
    for name, checks in _GROUPS:
        made = [
            notes.try_read(check.__name__.replace("_", " "), None, check, facts) for check in checks
        ]
        if lines := tuple(filter(None, made)):
            groups[name] = lines
    if notes.failed:
        found = tuple(map(_report_failed_check, notes.failed))
        groups["not checked"] = (CheckLine("not readable", "", found),)
    return Checklist(groups)


def _report_failed_check(why: str) -> Finding:
    return Finding(
        code="check-not-made",
        severity=Severity.INFO,
        summary="one check failed to run",
        evidence=why,
        remedy="No action needed: all other checks ran, and training is not affected",
    )
