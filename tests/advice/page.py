"""Writes docs/cures_flags.md from the table: `python -m tests.advice.page`."""

from pathlib import Path

from trainer_plugins import advice
from trainer_plugins.advice import Advice, of_machine, of_moments, of_training

PAGE = Path(__file__).parents[2] / "docs" / "cures_flags.md"
PARTS = {
    "A training step": of_training,
    "Loading, evaluation, generation, saving": of_moments,
    "The machine, engines, main memory, looking": of_machine,
}
HEAD = """# Cures by what they do

Every remedy that a message of this package names, as it is typed. Words in capitals are yours to
fill in. "Other result" means that the run computes something else than before; all others keep
the result, except for rounding. Which of them comes first for a cause: [explain](explain.md#causes).
"""


def row(each: Advice) -> str:
    first, *_ = each.spellings.values()
    price = each.price + "; other result" * (not each.keeps_result)
    cells = (each.effect, f"`{first}`", price.removeprefix("; ") or "none")
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def page() -> str:
    lines = [HEAD]
    for title, part in PARTS.items():
        entries = [each for name, each in vars(part).items() if name in advice.ALL]
        lines += [f"## {title}\n", "| what it does | type | price |", "| --- | --- | --- |"]
        lines += [*map(row, entries), ""]
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page())
