"""Situations of public issues, and what answers them; writes docs/situations.md: `python -m tests.situations`."""

import re
import sys
import textwrap
from dataclasses import dataclass, field
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:  # pytest brings it
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "situations.md"
QUESTIONS = ROOT / "docs" / "faq.md"
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


HEAD = """# 83 situations, and what answers them

Of 83 situations from public issues, **{solved} are solved**: one command prints the cause, and the
change that ends it. In {helps} it helps, {nothing} are not answered. Below each command are the
issues that [questions](faq.md) has in words, then others with what decides: what the answer says to
do, or a figure.

`tests/situations.toml` has each command with its input: the text of the issue where it shows one,
else one as the library of that time writes it. A test runs each command and looks for cause and
change; where another version or another launch has to be there, a test of the package stands for
the command. No change was tried on the machine of an issue's author, or on a GPU here.
"""
VERDICTS = ("solved", "helps", "not")
GROUPS = (
    ("explain", "`trainer-plugins explain train.log`"),
    ("configs", "`trainer-plugins configs check FILE`, with `--params`, `--host-memory`"),
    ("plan", "`trainer-plugins plan` and the flags of the run"),
    ("check", "`trainer-plugins check`, and `Preflight` in each preset"),
)


def in_questions() -> set[str]:
    """The issues of docs/faq.md, which names a repository once for several numbers."""
    found, repository = set(), ""
    for name, number in re.findall(r"([\w.-]*)#(\d+)", QUESTIONS.read_text()):
        repository = name or repository
        found.add(f"{repository}#{number}")
    return found


def filled(text: str, indent: str = "") -> str:
    return textwrap.fill(text, 100, subsequent_indent=indent, break_on_hyphens=False)


def page() -> str:
    everything, told = situations(), in_questions()
    of = {name: [each for each in everything if each.verdict == name] for name in VERDICTS}
    parts = [HEAD.format(solved=len(of["solved"]), helps=len(of["helps"]), nothing=len(of["not"]))]
    for name, title in GROUPS:
        some = [each for each in of["solved"] if (each.command or "check").startswith(name)]
        rest = [each for each in some if each.issue not in told]
        rows = [f"{each.issue:<27}{each.what:<34}{each.prints[-1]}" for each in rest]
        parts.append(f"## {title}\n")
        parts.append(filled(", ".join(each.issue for each in some if each.issue in told)) + "\n")
        parts.extend(["```text", *rows, "```\n"] if rows else [])
    for name, title in (("helps", "It helps"), ("not", "Not answered")):
        parts.append(f"## {title}\n")
        parts += [filled(f"- {one.issue}, {one.what}: {one.why}.", "  ") for one in of[name]]
        parts.append("")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
