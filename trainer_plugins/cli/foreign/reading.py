"""Turns names and values, as other programs have them, into options of `plan`."""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from trainer_plugins.cli.foreign.spellings import NO_INFLUENCE, NOT_PLANNED, SAME
from trainer_plugins.cli.plan_options import RunOptions
from trainer_plugins.launch.lint.training import argument_names, optimizer_names
from trainer_plugins.planner.plan import NotPredicted, PlanError
from trainer_plugins.printable import printable

_ADAPTER = {
    "lora_r": "r",
    "lora_target": "target_modules",
    "lora_dropout": "lora_dropout",
    "lora_modules_to_save": "modules_to_save",
    "lora_target_parameters": "target_parameters",
    "lora_task_type": "task_type",
    "init_lora_weights": "init_lora_weights",
    "use_dora": "use_dora",
}
"""Names of an adapter's settings, and what a LoraConfig calls them."""

_OFF = ("false", "no", "none", "null", "0", "", "[]", "{}", "disabled")
_LISTS = ("target_modules", "modules_to_save", "target_parameters")
_OF_ATTENTION = {
    "fa2": "flash_attention_2",
    "fa3": "flash_attention_3",
    "disabled": "eager",
    "flash_attention": "flash_attention_2",
    "use_flash_attn": "flash_attention_2",
    "use_flash_attention_2": "flash_attention_2",
    "flex_attention": "flex_attention",
    "sdp_attention": "sdpa",
    "eager_attention": "eager",
    "xformers_attention": "xformers",
    "sage_attention": "sage",
}
"""What names of switches, and words of `flash_attn`, mean for `--attn-implementation`."""

_READ_HERE = ("use_peft", "max_length", "quantize", "bits", "use_reentrant", "flash_attn", "optim")

OPTIONS: Mapping[str, Any] = {
    each.name: each
    for group in fields(RunOptions)
    for each in fields(group.type)  # type: ignore
}
"""The options of `plan` that describe a run, by name."""


@dataclass(slots=True)
class Reading:
    """Holds what was read: what is not yet understood, and what it means here."""

    values: dict[str, Any]
    trainer: str | None = None  # of TRL
    options: dict[str, Any] = field(default_factory=dict)  # of `plan`
    flags: dict[str, Any] = field(default_factory=dict)  # of TrainingArguments, or of TRL's
    said: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    spelt: dict[str, str] = field(default_factory=dict)  # names as they were given

    def __post_init__(self) -> None:
        given = {name.replace("-", "_"): value for name, value in self.values.items()}
        self.values = {}
        for name, value in given.items():
            meant = SAME.get(name, name)
            if meant in self.values and meant != name:
                continue  # the name that is used here wins
            self.values[meant] = value
            self.spelt[meant] = name

    def take(self, name: str, default: Any = None) -> Any:
        """Return a value and forget it; nothing is its default."""
        value = self.values.pop(name, None)
        return default if value is None or value == "" else value

    def is_on(self, name: str, default: bool = False) -> bool:
        """Return whether a switch is on, and forget it."""
        return is_true(self.take(name, default))

    def forget(self, prefix: str) -> None:
        """Forget all names that begin so."""
        self.values = {k: v for k, v in self.values.items() if not k.startswith(prefix)}

    def refuse(self, name: str, why: str) -> None:
        """Refuse a name that asks for what is not planned."""
        raise NotPredicted(f"--{self.spelt.get(name, name)}: {why}")

    def words(self) -> list[str]:
        """Return options and flags as words of a command."""
        found: list[str] = []
        for name, value in self.options.items():
            found += _option(name, value)
        for name, value in self.flags.items():
            found += [f"--{name}", *_texts(value)]
        return found


def is_true(value: object) -> bool:
    """Return whether a value switches something on.

    >>> is_true("True"), is_true("auto"), is_true("no"), is_true(None)
    (True, True, False, False)
    """
    return str(value).lower() not in _OFF


def finish(reading: Reading, *, keeps_unknown: bool = False) -> Reading:
    """Understand what a front end has not taken: adapters, quantisation, attention and the rest."""
    _refuse_not_planned(reading)
    reading.trainer = trainer = reading.take("trainer", reading.trainer)
    if trainer is not None:
        reading.options["trainer"] = trainer
        _defaults_of_trl(reading)
    _quantisation(reading)
    _adapter(reading)
    _attention(reading)
    _length(reading)
    _checkpointing(reading)
    known = argument_names(trainer)
    for name, value in reading.values.items():
        positive = name.removeprefix("no_")
        if name in OPTIONS:
            reading.options.setdefault(name, value)
        elif name in NO_INFLUENCE and not (keeps_unknown and name in known):
            reading.ignored.append(name)
        elif value is None or value == "":
            continue
        elif name in known:
            reading.flags.setdefault(name, value)
        elif positive != name and positive in known:  # as HfArgumentParser spells a switch
            reading.flags[positive] = False
        elif keeps_unknown:
            reading.flags[name] = value
        else:
            reading.unknown.append(name)
    _check_optimizer(reading)
    return reading


def _refuse_not_planned(reading: Reading) -> None:
    for name in [name for name in reading.values if name in NOT_PLANNED]:
        if is_true(value := reading.values.pop(name)) and str(value) != "1":  # of one card
            reading.refuse(name, NOT_PLANNED[name])


def _defaults_of_trl(reading: Reading) -> None:
    """Add what TRL's programs take for granted, which are known by their `--use_peft`."""
    values = reading.values
    if "use_peft" in values:
        values.setdefault("bnb_4bit_quant_type", "nf4")
        dtype = values.get("dtype", reading.options.get("dtype"))
        values.setdefault("bnb_4bit_compute_dtype", None if dtype == "auto" else dtype)
        if is_true(values["use_peft"]):
            values.setdefault("lora_dropout", 0.05)


def _quantisation(reading: Reading) -> None:
    """Read how the base is quantised; `bits` and `quantize` are words of PEFT's examples."""
    bits, four_bit = reading.take("bits"), False
    if reading.is_on("quantize") or bits in ("nf4", "fp4"):
        reading.values |= {
            "load_in_4bit": True,
            "bnb_4bit_use_double_quant": True,
            "bnb_4bit_compute_dtype": "bfloat16",
            "bnb_4bit_quant_type": bits or "nf4",
        }
    elif bits == "int8":
        reading.values["load_in_8bit"] = True
    elif bits is not None:
        reading.options["dtype"] = bits
    four_bit = reading.is_on("load_in_4bit")
    if four_bit:
        reading.options["load_in_4bit"] = True
    if reading.is_on("load_in_8bit"):
        reading.options["load_in_8bit"] = True
    for name in [name for name in reading.values if name.startswith("bnb_4bit_")]:
        value = reading.take(name)
        if four_bit and value is not None:  # without 4 bits the fields have no effect
            is_switch = name == "bnb_4bit_use_double_quant"
            reading.options[name] = is_true(value) if is_switch else str(value)


def _adapter(reading: Reading) -> None:
    """Read a LoraConfig; whose alpha and scaling do not change memory, but whose dropout does."""
    wanted = reading.take("use_peft")
    named = [name for name in reading.values if name in _ADAPTER]
    given = {_ADAPTER[name]: reading.take(name) for name in named}
    given = {name: value for name, value in given.items() if value is not None}
    if wanted is not None and not is_true(wanted):
        return
    if "r" not in given and wanted is None:
        if given:
            raise PlanError(f"--{named[0]} belongs to an adapter: give its rank, --lora-r")
        return
    for name in _LISTS:
        if name in given:
            given[name] = modules(given[name])
    if "use_dora" in given:
        given["use_dora"] = is_true(given["use_dora"])
    if "init_lora_weights" in given:
        reading.said.append("what init_lora_weights computes while it loads is not planned")
        del given["init_lora_weights"]
    given["r"] = int(given.get("r", 16))
    if "lora_dropout" in given:
        given["lora_dropout"] = float(given["lora_dropout"])
    if wanted is None and not given.keys() - {"r", "target_modules"}:
        reading.options["lora_r"] = given["r"]
        if "target_modules" in given:
            target = given["target_modules"]
            reading.options["lora_target"] = target if target == "all-linear" else ",".join(target)
        return
    if wanted is None:  # without TRL's switch, plan's own default
        given.setdefault("target_modules", "all-linear")
    reading.options["peft_config"] = json.dumps({"peft_type": "LORA", **given})


def modules(value: object) -> Any:
    """Return names of modules as PEFT takes them.

    >>> modules("q_proj,v_proj"), modules(["q_proj,", "v_proj"]), modules("all")
    (['q_proj', 'v_proj'], ['q_proj', 'v_proj'], 'all-linear')
    """
    parts = value if isinstance(value, (list, tuple)) else [value]
    names = [name.strip() for part in parts for name in str(part).split(",") if name.strip()]
    return "all-linear" if names in (["all"], ["all-linear"]) else names


def _attention(reading: Reading) -> None:
    word = reading.take("flash_attn")
    if word not in (None, "auto"):
        reading.options["attn_implementation"] = _OF_ATTENTION.get(str(word), str(word))
    for name, meant in _OF_ATTENTION.items():
        if name in reading.values and reading.is_on(name):
            reading.options["attn_implementation"] = meant


def _length(reading: Reading) -> None:
    """Read the tokens of a row: TRL also cuts its rows at `max_length`."""
    most = reading.take("max_length")
    if most is None or not is_true(most):
        if most is not None and reading.trainer is not None:
            reading.flags["max_length"] = most
        return
    reading.values.setdefault("seq_length", most)
    if reading.trainer is not None:
        reading.flags["max_length"] = most


def _checkpointing(reading: Reading) -> None:
    reentrant = reading.take("use_reentrant")  # PEFT: examples/sft/train.py
    if reentrant is not None and is_true(reading.values.get("gradient_checkpointing")):
        kwargs = {"use_reentrant": is_true(reentrant)}
        reading.values.setdefault("gradient_checkpointing_kwargs", kwargs)


def _check_optimizer(reading: Reading) -> None:
    import importlib.metadata

    name, known = reading.flags.get("optim"), optimizer_names()
    if name is not None and known and str(name) not in known:
        version = importlib.metadata.version("transformers")
        reading.refuse("optim", f"transformers {version} has no optimizer {name!r}")


def _option(name: str, value: object) -> Iterator[str]:
    flag = f"--{name.replace('_', '-')}"
    switch = OPTIONS[name].type
    if switch in (bool, bool | None):
        if is_true(value):
            yield flag
        elif OPTIONS[name].default is not False:
            yield f"--no-{name.replace('_', '-')}"
        return
    yield flag
    yield from _texts(value)


def _texts(value: object) -> Sequence[str]:
    if isinstance(value, Mapping):
        return [json.dumps(value)]
    if isinstance(value, (list, tuple)):
        return [str(each) for each in value]
    return [str(value)]


def is_spelling(name: str) -> bool:
    """Return whether a name, or the value that it has, is to be understood before it is parsed."""
    groups = (SAME, NO_INFLUENCE, NOT_PLANNED, _ADAPTER, _OF_ATTENTION, _READ_HERE)
    return any(name in group for group in groups)


def tell(reading: Reading, *before: str) -> None:
    """Say on stderr what was read, what has no influence on memory, and what is not known."""
    lines = [*before, *reading.said]
    if reading.ignored:
        lines.append(f"no influence on memory: {', '.join(sorted(reading.ignored))}")
    if reading.unknown:
        lines.append(f"not understood, and left out: {', '.join(sorted(reading.unknown))}")
    for line in lines:
        print(f"planning: {printable(line)}", file=sys.stderr)
