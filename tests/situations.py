"""Situations of public issues, each with the command that answers it."""

import sys
from dataclasses import dataclass, field
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:  # pytest brings it
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "tests" / "planner" / "configs"
CORPUS = ROOT / "tests" / "explain" / "corpus"
QUICK = ("explain", "configs")  # the others plan, which takes seconds


@dataclass(frozen=True, kw_only=True)
class Situation:
    """Holds an issue in its author's case, the command that answers it, and what that prints."""

    issue: str
    what: str
    command: str = ""  # after `trainer-plugins`; empty if there is none
    prints: list[str] = field(default_factory=list)  # what decides: the cause, and the change
    verdict: str = "solved"  # or `helps`, or `not`
    why: str = ""  # why it is not solved
    test: str = ""  # shows what a command does then, or stands for one
    log: str = ""  # what the user gives to `explain`
    corpus: str = ""  # the same, where the corpus of `explain` has it
    files: dict[str, str] = field(default_factory=dict)

    @property
    def is_quick(self) -> bool:
        return self.command.startswith(QUICK)


def situations() -> list[Situation]:
    table = tomllib.loads((Path(__file__).with_suffix(".toml")).read_text())
    return [Situation(**each) for each in table["situation"]]
