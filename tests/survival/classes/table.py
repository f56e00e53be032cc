"""The table of what became of each class, as it stands in the docs.

The sweep holds every class against it.

`python -m tests.survival.classes.table` writes it.
"""

import re
import sys
import tempfile
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path

from tests.survival.classes.judge import TOLERANCE, Outcome, class_names, outcome_of

PAGE = Path(__file__).parents[3] / "docs" / "survival_classes.md"
_HEAD = """# Every class of transformers that takes a loss

The real Trainer trained a tiny model of each class twice: once as it is, once with an out-of-memory
error in a backward and in a forward pass. It did so in float64, on padded rows with their attention
mask, whose labels at padding were ignored in one micro-batch and not in the other; vision-language
models on text alone. Gradients were compared: a class is exact if they are off by less than
{tolerance:.0e} of a parameter's gradient. The classes are those of transformers {version}. CI
compares every line with the outcome, and `python -m tests.survival.classes.table` writes this page.

{counts}
"""
_TITLES = {
    "exact": "Exact: {why}",
    "refused": "Refused when it is attached: {why}",
    "refused when measured": "Refused at the first failure: {why}",
    "not tried": "Not tried: {why}",
    "wrong": "Wrong: {why}",
}


def read_table() -> dict[str, Outcome]:
    """Each class that the page lists, and what it says of it."""
    table: dict[str, Outcome] = {}
    for title, names in re.findall(
        r"^## (.*?) \(\d+\)\n\n(.*?)\n(?=\n##|\Z)", PAGE.read_text(), re.M | re.S
    ):
        kind = next(
            k for k, pattern in _TITLES.items() if title.startswith(pattern.partition("{")[0])
        )
        why = title.removeprefix(_TITLES[kind].partition("{")[0])
        table |= dict.fromkeys(re.findall(r"\w+", names), Outcome(kind, why))
    return table


def table_version() -> str:
    """The version of transformers that the page is of."""
    (found,) = re.findall(r"those of transformers (\S+)\. CI", PAGE.read_text())
    return str(found)


def render(table: dict[str, Outcome]) -> str:
    """The page, the most frequent first."""
    groups: dict[Outcome, list[str]] = defaultdict(list)
    for name, outcome in table.items():
        groups[outcome].append(name)
    kinds = {kind: sum(outcome.kind == kind for outcome in table.values()) for kind in _TITLES}
    counts = " | ".join(f"{num} {kind}" for kind, num in kinds.items())
    page = _HEAD.format(
        version=version("transformers"),
        tolerance=TOLERANCE,
        counts=f"{len(table)} classes: {counts}",
    )
    order = sorted(
        groups, key=lambda outcome: (list(_TITLES).index(outcome.kind), -len(groups[outcome]))
    )
    for outcome in order:
        names = ", ".join(sorted(groups[outcome]))
        page += f"\n## {_TITLES[outcome.kind].format(why=outcome.why)} ({len(groups[outcome])})\n\n{names}\n"
    return page


def main() -> None:
    """Try every class, and write the page. Takes some minutes."""
    table = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in class_names():
            if (outcome := outcome_of(name, Path(folder))) is not None:
                table[name] = outcome
                print(name, outcome, file=sys.stderr)
    PAGE.write_text(render(table))


if __name__ == "__main__":
    main()
