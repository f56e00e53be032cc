"""Checks a run before step 1: facts are gathered in one place, and judged by pure functions."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from trainer_plugins.check import arguments, data, environment, machine, main_memory, model, planned
from trainer_plugins.check.facts import Facts, Line
from trainer_plugins.finding import Finding, Severity

logger = logging.getLogger(__name__)

_GROUPS: tuple[tuple[str, tuple[Callable[[Facts], Line | None], ...]], ...] = (
    ("machine", machine.CHECKS),
    ("main memory", main_memory.CHECKS),
    ("plan", planned.CHECKS),
    ("model", (*model.CHECKS, *data.CHECKS)),
    ("arguments", arguments.CHECKS),
    ("environment", environment.CHECKS),
)


@dataclass(frozen=True, slots=True)
class Checklist:
    """Holds what all checks saw and found, by group."""

    groups: tuple[tuple[str, tuple[Line, ...]], ...]

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Return what was found, the worst first."""
        found = [each for _, lines in self.groups for line in lines for each in line.findings]
        return tuple(sorted(dict.fromkeys(found), key=lambda finding: -finding.severity))

    @property
    def worst(self) -> Severity:
        """Return the highest severity; INFO if nothing was found."""
        return max((finding.severity for finding in self.findings), default=Severity.INFO)


def judge(facts: Facts) -> Checklist:
    """Make every check whose facts are known. It needs milliseconds, and never raises."""
    groups = [
        (name, tuple(line for check in checks if (line := _made(check, facts)) is not None))
        for name, checks in _GROUPS
    ]
    if facts.failed:
        found = tuple(map(_not_made, facts.failed))
        groups.append(("not checked", (Line("could not be looked at", "", found),)))
    return Checklist(tuple((name, lines) for name, lines in groups if lines))


def _made(check: Callable[[Facts], Line | None], facts: Facts) -> Line | None:
    """Make one check: one that fails must neither end a training nor cost the others."""
    try:
        return check(facts)
    except Exception as error:
        logger.debug("a check failed", exc_info=True)
        name = check.__name__.replace("_", " ")
        return Line(name, "", (_not_made(f"{name}: {type(error).__name__}: {error}"),))


def _not_made(why: str) -> Finding:
    return Finding(
        code="check-not-made",
        severity=Severity.INFO,
        summary="one check could not be made",
        evidence=why,
        remedy="The others were made; training is not affected",
    )
