"""Advice: one way to save memory, with its spelling at each door where you can type it."""

import re
from dataclasses import dataclass
from enum import Enum


class Door(Enum):
    """Names a place where you type a setting, which determines its spelling."""

    TRAINER = "trainer"  # a flag of TrainingArguments on the command line of a script
    ARGUMENTS = "arguments"  # an argument of TrainingArguments, SFTConfig and the like in Python
    TRL = "trl"  # a flag of TRL's scripts, beyond TrainingArguments
    CODE = "code"  # a line of Python in the script
    ACCELERATE = "accelerate"  # a line of accelerate's YAML file
    DEEPSPEED = "deepspeed"  # a key of DeepSpeed's JSON file
    ENVIRONMENT = "environment"  # a variable to export before the launch
    SHELL = "shell"  # a command
    HYDRA = "hydra"  # an override on the command line of a Hydra app
    VLLM = "vllm"  # a flag of `vllm serve`
    SGLANG = "sglang"  # a flag of SGLang's server
    VERL = "verl"  # an override of verl
    PLAN = "plan"  # an option of `trainer-plugins plan`


# Filled in by the caller. An unfilled blank tells the reader which value belongs there.
BLANKS = (
    "ROWS", "STEPS", "LENGTH", "COMMAND", "OPTIONS", "PLACE", "PID", "CARD", "CARDS", "SHARE",
    "SIZE", "WORKERS", "SEQUENCES", "LAYER", "LAYERS", "HOW", "MEGABYTES", "CHECKPOINT",
    "GENERATIONS",
)  # fmt: skip
_BLANK = re.compile(rf"(?<![\w$])(?:{'|'.join(BLANKS)})(?!\w)")
_FLAG = re.compile(r"--(\w+) ('[^']*'|\S+)")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Advice:
    """Describes one remedy, with one spelling per door; an empty one cannot be typed there."""

    effect: str  # one clause: "only the inputs of layers are kept for the backward pass"
    price: str = ""  # its cost; empty if none
    only_on: tuple[str, ...] = ()  # vendors whose cards it applies to; empty for all
    unfilled: str = ""  # the text for its first door if the values are unknown
    trainer: str = ""
    arguments: str = ""
    trl: str = ""
    code: str = ""
    accelerate: str = ""
    deepspeed: str = ""
    environment: str = ""
    shell: str = ""
    hydra: str = ""
    vllm: str = ""
    sglang: str = ""
    verl: str = ""
    plan: str = ""

    @property
    def spellings(self) -> dict[Door, str]:
        found = {door: text for door in Door if (text := getattr(self, door.value))}
        if self.trainer:
            found.setdefault(Door.ARGUMENTS, write_arguments(self.trainer))
        return found

    def flag(self, door: Door, **values: object) -> str:
        """Return its spelling at a door, blanks filled: `flag(Door.TRAINER, rows=4, steps=16)`."""
        spellings = self.spellings
        text = spellings.get(door, "")
        blanks = {each.lower() for each in _BLANK.findall(text)}
        if not text or not values.keys() <= blanks:
            raise ValueError(
                f"{self.effect!r} has no {door.name} with {', '.join(values) or 'text'}"
            )
        if not values and self.unfilled and door in (next(iter(spellings)), Door.ARGUMENTS):
            return self.unfilled.replace("--", "") if door is Door.ARGUMENTS else self.unfilled
        return _BLANK.sub(lambda blank: str(values.get(blank[0].lower(), blank[0])), text)


def write_arguments(flags: str) -> str:
    """Convert command-line flags to Python arguments.

    >>> write_arguments("--optim adafactor --bf16 True")
    'optim="adafactor", bf16=True'
    """
    plain = re.compile(r"True|False|[\d.]+|[A-Z]+")
    return ", ".join(
        f"{name}={value}" if plain.fullmatch(value) else f'{name}="{value}"'
        for name, value in _FLAG.findall(flags)
    )


def flags_in(text: str) -> dict[str, str]:
    """Parse the flags of a spelling; empty if it contains anything else.

    >>> flags_in("--optim adafactor --kwargs '{}'"), flags_in("loss.item()")
    ({'optim': 'adafactor', 'kwargs': '{}'}, {})
    """
    if _FLAG.sub("", text).strip():
        return {}
    return {name: value.strip("'") for name, value in _FLAG.findall(text)}
