"""The table of what became of each class: `outcomes.md` next to this file.

The sweep compares every class with `outcomes.md`. `python -m tests.survival.classes.table` tries
every class and writes it.
"""

import re
import sys
import tempfile
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path

from tests.survival.classes.judge import Outcome, class_names, outcome_of

OUTCOMES = Path(__file__).parent / "outcomes.md"
_TITLES = {
    "exact": "Exact: {why}",
    "refused": "Refused when it is attached: {why}",
    "refused when measured": "Refused at the first failure: {why}",
    "not tried": "Not tried: {why}",
    "wrong": "Wrong: {why}",
}


def read_table() -> dict[str, Outcome]:
    """Return the outcome of each class in `outcomes.md`."""
    table: dict[str, Outcome] = {}
    for title, names in re.findall(
        r"^## (.*?) \(\d+\)\n\n(.*?)\n(?=\n##|\Z)", OUTCOMES.read_text(), re.M | re.S
    ):
        kind = next(
            k for k, pattern in _TITLES.items() if title.startswith(pattern.partition("{")[0])
        )
        why = title.removeprefix(_TITLES[kind].partition("{")[0])
        table |= dict.fromkeys(re.findall(r"\w+", names), Outcome(kind, why))
    return table


def table_version() -> str:
    """Return the version of transformers that the table is of."""
    (found,) = re.findall(r"^transformers (\S+)\n", OUTCOMES.read_text())
    return str(found)


def render_outcomes(table: dict[str, Outcome], of_version: str) -> str:
    """Return the text of `outcomes.md`, the most frequent outcome first."""
    groups: dict[Outcome, list[str]] = defaultdict(list)
    for name, outcome in table.items():
        groups[outcome].append(name)
    order = sorted(
        groups, key=lambda outcome: (list(_TITLES).index(outcome.kind), -len(groups[outcome]))
    )
    sections = [
        _section(_TITLES[outcome.kind].format(why=outcome.why), groups[outcome])
        for outcome in order
    ]
    return f"transformers {of_version}\n{''.join(sections)}"


def _section(title: str, names: list[str]) -> str:
    return f"\n## {title} ({len(names)})\n\n{', '.join(sorted(names))}\n"


def main() -> None:
    """Try every class, which takes some minutes, and write the table."""
    table = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in class_names():
            if (outcome := outcome_of(name, Path(folder))) is not None:
                table[name] = outcome
                print(name, outcome, file=sys.stderr)
    OUTCOMES.write_text(render_outcomes(table, version("transformers")))


if __name__ == "__main__":
    main()
