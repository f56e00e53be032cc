"""The table of what became of each class: `outcomes.md` next to this file, and its page in the docs.

The sweep compares every class with `outcomes.md`. `python -m tests.survival.classes.table` tries
every class and writes both; with `--page` it only writes the page again.
"""

import re
import sys
import tempfile
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path

from tests.survival.classes.judge import TOLERANCE, Outcome, class_names, outcome_of

OUTCOMES = Path(__file__).parent / "outcomes.md"
PAGE = Path(__file__).parents[3] / "docs" / "survival_classes.md"
_HEAD = """# Every class of transformers that takes a loss

Search this page for the class of your model: if [survival](survival.md) refuses to divide its
micro-batches, it is in one of the lists. Any other class is exact or was not tried:

```bash
grep -ow -e '^## .*' -e LlamaForCausalLM tests/survival/classes/outcomes.md | grep -B 1 ^Llama
```
```text
## Exact: a sum over the window ({sums})
LlamaForCausalLM
```

{num} classes of transformers {version}: {counts}.

The real Trainer trained a tiny model of each class twice in float64: once undisturbed, once with an
out-of-memory error in a backward and in a forward pass. Rows had padding; labels there were ignored
in one micro-batch and not in the other; vision-language models saw text alone. A class is exact if
gradients are off by less than {tolerance:.0e} of a parameter's gradient, or 1e-03 if it only computes
in float32. CI compares every class with `outcomes.md`.
"""
_TITLES = {
    "exact": "Exact: {why}",
    "refused": "Refused when it is attached: {why}",
    "refused when measured": "Refused at the first failure: {why}",
    "not tried": "Not tried: {why}",
    "wrong": "Wrong: {why}",
}
_FREQUENT = {
    "batch normalization": "Refused: batch normalization",
    "is not known to be a sum": "Refused: its loss is not known to be a sum over examples",
}
"""Words of the reasons that many classes share, and the title of their section on the page."""


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


def render_page(table: dict[str, Outcome], of_version: str) -> str:
    """Return the text of the page: the names of refused classes, one list for each reason."""
    kinds = {kind: sum(outcome.kind == kind for outcome in table.values()) for kind in _TITLES}
    counts = ", ".join(f"{num} {kind}" for kind, num in kinds.items())
    sums = list(table.values()).count(Outcome("exact", "a sum over the window"))
    page = _HEAD.format(
        version=of_version, tolerance=TOLERANCE, num=len(table), counts=counts, sums=sums
    )
    refused: dict[str, list[str]] = defaultdict(list)
    not_tried: dict[str, int] = defaultdict(int)
    for name, outcome in table.items():
        if outcome.kind == "not tried":
            not_tried[outcome.why] += 1
        elif outcome.kind != "exact":
            refused[_refusal(outcome)].append(name)
    for title in sorted(refused, key=lambda title: -len(refused[title])):
        page += _section(title, refused[title])
    reasons = "".join(f"- {why}: {num}\n" for why, num in not_tried.items())
    return f"{page}\n## Not tried ({kinds['not tried']})\n\n{reasons}"


def _section(title: str, names: list[str]) -> str:
    return f"\n## {title} ({len(names)})\n\n{', '.join(sorted(names))}\n"


def _refusal(outcome: Outcome) -> str:
    for words, title in _FREQUENT.items():
        if words in outcome.why:
            return title
    return _TITLES[outcome.kind].format(why=outcome.why)


def main() -> None:
    """Try every class, which takes some minutes, and write the table and its page."""
    if "--page" not in sys.argv:
        table = {}
        with tempfile.TemporaryDirectory() as folder:
            for name in class_names():
                if (outcome := outcome_of(name, Path(folder))) is not None:
                    table[name] = outcome
                    print(name, outcome, file=sys.stderr)
        OUTCOMES.write_text(render_outcomes(table, version("transformers")))
    PAGE.write_text(render_page(read_table(), table_version()))


if __name__ == "__main__":
    main()
