"""Writes docs/cures_flags.md from the table: `python -m tests.advice.page`."""

from pathlib import Path

from trainer_plugins import advice
from trainer_plugins.advice import Advice, Door, of_machine, of_moments, of_training
from trainer_plugins.advice.entry import as_arguments

PAGE = Path(__file__).parents[2] / "docs" / "cures_flags.md"
PARTS = {
    "A training step": of_training,
    "Loading, evaluation, generation, saving": of_moments,
    "The machine, engines, main memory, looking": of_machine,
}
HEAD = """# Cures by what they do

Every remedy that a message of this package names, as it is typed. Words in capitals are yours to
fill in. A flag `--name value` is `name=value` in TrainingArguments. "Other result" means that the
run computes something else than before; all others keep the result, except for rounding. Which of
them comes first for a cause: [explain](explain.md#causes).
"""


DOORS = {
    Door.TRAINER: "flag", Door.ARGUMENTS: "arguments", Door.TRL: "TRL", Door.CODE: "Python",
    Door.ACCELERATE: "accelerate", Door.DEEPSPEED: "DeepSpeed", Door.ENVIRONMENT: "variable",
    Door.SHELL: "shell", Door.HYDRA: "Hydra", Door.VLLM: "vLLM", Door.SGLANG: "SGLang",
    Door.VERL: "verl", Door.PLAN: "plan",
}  # fmt: skip


def row(each: Advice) -> str:
    doors = {door: text for door, text in each.spellings.items() if text != derived(each, door)}
    typed = "<br>".join(f"{DOORS[door]}: `{text}`" for door, text in doors.items())
    price = each.price + "; other result" * (not each.keeps_result)
    cells = (each.effect, typed, price.removeprefix("; ") or "none")
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def derived(each: Advice, door: Door) -> str:
    """What follows from the flag, and need not be shown."""
    return as_arguments(each.trainer) if door is Door.ARGUMENTS else ""


def page() -> str:
    lines = [HEAD]
    for title, part in PARTS.items():
        entries = [each for name, each in vars(part).items() if name in advice.ALL]
        lines += [f"## {title}\n", "| what it does | type | price |", "| --- | --- | --- |"]
        lines += [*map(row, entries), ""]
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page())
