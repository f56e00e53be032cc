"""Writes docs/remedies.md from the table: `python -m tests.advice.page`."""

import re
from pathlib import Path

from trainer_plugins import advice, checkpointing
from trainer_plugins.advice import Advice, Door, of_machine, of_moments, of_training
from trainer_plugins.advice.entry import write_arguments

PAGE = Path(__file__).parents[2] / "docs" / "remedies.md"
PARTS = {
    "A training step": of_training,
    "Loading, evaluation, generation, saving": of_moments,
    "The machine, engines, main memory": of_machine,
}
NAMED = {
    Door.ACCELERATE: "accelerate", Door.DEEPSPEED: "DeepSpeed", Door.VLLM: "vLLM",
    Door.SGLANG: "SGLang", Door.VERL: "verl", Door.PLAN: "plan",
}  # fmt: skip
"""The doors that a reader cannot tell from the spelling."""

LOOKS = re.compile(r"(compares|lists|predicts|prints|records|says|shows) ")
"""How the effect of a command begins that changes nothing."""

HEAD = """# Every remedy, with its price

You find here every remedy that a message of this package suggests: how you type it, its effect, and
its price in italics. [`explain`](explain.md) and [`plan`](plan.md) tell you which one your run needs
first. If a remedy changes the result of your run, its price says how. Replace the words in
capitals. In Python, `--optim adafactor` is `optim="adafactor"`. transformers 5.23
[renamed](versions.md#what-is-supported) `gradient_checkpointing`: messages use the name that your
version wants.
"""


def spellings(each: Advice) -> str:
    """What to type at each door, but for what follows from another door's spelling."""
    found = each.spellings
    derived = {write_arguments(each.trainer), write_arguments(each.trl)}
    texts = []
    for door, text in found.items():
        if door is Door.ARGUMENTS and text in derived:
            continue
        if any(other.startswith(f"{text} ") for other in found.values()):
            continue  # a variable, which its command repeats
        code = text if "`" in text else f"`{text}`"
        texts.append(f"{NAMED[door]} {code}" if door in NAMED else code)
    return ", ".join(texts)


def lines(entries: list[Advice]) -> list[str]:
    """One line for each effect and price, with all entries that have both."""
    typed: dict[str, list[str]] = {}
    for each in entries:
        what = f"{each.effect}. *{each.price}*" if each.price else each.effect
        typed.setdefault(what, []).append(spellings(each))
    return [f"- {', '.join(flags)}: {effect}" for effect, flags in typed.items()]


def page() -> str:
    text = []
    for title, part in PARTS.items():
        named = [each for name, each in vars(part).items() if name in advice.ALL]
        listed = [each for each in named if not LOOKS.match(each.effect)]
        text += [f"## {title}\n", *lines(listed), ""]
    # The page names what every version takes.
    entries = "\n".join(text).replace(checkpointing.NAME, "gradient_checkpointing")
    return f"{HEAD}\n{entries}"


if __name__ == "__main__":
    PAGE.write_text(page())
