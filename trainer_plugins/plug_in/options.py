"""What a user may choose: one table, from which command lines, `attach` and `protect` are made."""

import os
from dataclasses import Field, dataclass, field, fields
from importlib import import_module
from typing import TYPE_CHECKING, Any

from trainer_plugins.presets import CUDA_CACHE, SURVIVE, WATCHDOG, nearest, preset

if TYPE_CHECKING:
    from transformers import TrainerCallback

DEFAULT_PRESET = "memory_safe"
PREFIX = "memory_"

# Each option, the class it is for, and the parameter of that class. It cannot stand in the fields'
# metadata, which HfArgumentParser hands to argparse as they are.
_PARAMETERS = {
    "memory_every_steps": (WATCHDOG, "every_steps"),
    "memory_warn_fraction": (WATCHDOG, "warn_fraction"),
    "memory_act_fraction": (WATCHDOG, "act_fraction"),
    "memory_stop": (WATCHDOG, "stop"),
    "memory_prometheus_dir": (WATCHDOG, "prometheus_dir"),
    "memory_release_every_steps": (CUDA_CACHE, "interval"),
    "memory_min_reclaimable_fraction": (CUDA_CACHE, "min_reclaimable_fraction"),
    "memory_on_refusal": (SURVIVE, "on_refusal"),
    "memory_vouch_for_loss": (SURVIVE, "vouch_for_loss"),
}


@dataclass
class MemoryArguments:
    """Arguments for `HfArgumentParser((TrainingArguments, MemoryArguments))` and TRL's `TrlParser`.

    Not frozen, so that your own dataclass of arguments can inherit it.

    Raises:
        ValueError: an unknown preset, a value out of range, or an option for a callback that the
            preset does not have.
    """

    memory_preset: str = field(
        default=DEFAULT_PRESET,
        metadata={
            "help": "Which callbacks: observe, memory_safe, survive, or a preset that an installed package offers."
        },
    )
    memory_every_steps: int = field(
        default=1,
        metadata={"help": "Read the device every so many optimizer steps. (MemoryWatchdog)"},
    )
    memory_warn_fraction: float = field(
        default=0.90,
        metadata={"help": "Warn when this share of the device is in use, 0 to 1. (MemoryWatchdog)"},
    )
    memory_act_fraction: float = field(
        default=0.97,
        metadata={"help": "An error from this share of the device on, 0 to 1. (MemoryWatchdog)"},
    )
    memory_stop: bool = field(
        default=False,
        metadata={
            "help": "On an error, save a checkpoint and end training on all ranks. (MemoryWatchdog)"
        },
    )
    memory_prometheus_dir: str | None = field(
        default=None,
        metadata={
            "help": "Also write the numbers into this folder, for node_exporter. (MemoryWatchdog)"
        },
    )
    memory_release_every_steps: int = field(
        default=10,
        metadata={"help": "Ask every so many optimizer steps for a release. (CudaCacheCallback)"},
    )
    memory_min_reclaimable_fraction: float = field(
        default=0.10,
        metadata={
            "help": "Release when some rank has cached this share of its card, 0 to 1. (CudaCacheCallback)"
        },
    )

    memory_on_refusal: str = field(
        default="warn",
        metadata={
            "help": "Where out-of-memory errors of a run cannot be survived: warn, or error. (SurviveOOM)"
        },
    )
    memory_vouch_for_loss: bool = field(
        default=False,
        metadata={
            "help": "A loss of your own is a sum or mean over examples: measured, then divided. (SurviveOOM)"
        },
    )

    def __post_init__(self) -> None:
        if isinstance(self.memory_prometheus_dir, os.PathLike):
            self.memory_prometheus_dir = os.fspath(self.memory_prometheus_dir)
        has = preset(self.memory_preset).callbacks
        for option in fields(MemoryArguments):
            value = getattr(self, option.name)
            if value is not option.default and not _fits(value, kind_of(option)):
                raise ValueError(
                    f"{option.name} takes a value of type {kind_of(option).__name__}, got {value!r}"
                )
            target = _PARAMETERS.get(option.name)
            if target and target[0] not in has and value != option.default:
                name = target[0].rpartition(".")[2]
                raise ValueError(
                    f"{option.name} is for {name}, which the preset {self.memory_preset} does not have"
                )
        # What the callbacks would refuse, said here, where nothing has begun and torch is not there
        # yet.
        for name in ("memory_every_steps", "memory_release_every_steps"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"{name} counts optimizer steps, 1 or more, got {getattr(self, name)}"
                )
        if not 0 < self.memory_warn_fraction <= self.memory_act_fraction <= 1:
            raise ValueError(
                "a budget needs 0 < memory_warn_fraction <= memory_act_fraction <= 1, "
                f"got {self.memory_warn_fraction} and {self.memory_act_fraction}"
            )
        if self.memory_on_refusal not in ("warn", "error"):
            raise ValueError(f"memory_on_refusal is warn or error, got {self.memory_on_refusal!r}")
        if not 0 <= self.memory_min_reclaimable_fraction <= 1:
            got = self.memory_min_reclaimable_fraction
            raise ValueError(
                f"memory_min_reclaimable_fraction is a share of the card, 0 to 1, got {got}"
            )


def memory_arguments(preset: str = DEFAULT_PRESET, **options: Any) -> MemoryArguments:
    """The arguments that `attach` and `protect` take: a preset, and options without their prefix.

    Raises:
        ValueError: an unknown preset or option (with the nearest that there is), or a bad value.
    """
    known = [name.removeprefix(PREFIX) for name in _PARAMETERS]
    for name in options:
        if name not in known:
            raise ValueError(
                f"there is no option {name!r}.{nearest(name, known)} There are: {', '.join(known)}"
            )
    return MemoryArguments(
        memory_preset=preset, **{PREFIX + name: value for name, value in options.items()}
    )


def callbacks_from_args(args: MemoryArguments) -> "list[TrainerCallback]":
    """Fresh callbacks, as the arguments say: `Trainer(..., callbacks=callbacks_from_args(memory_args))`.

    Raises:
        ValueError: the preset names a class that cannot be imported.
    """
    callbacks: list[TrainerCallback] = []
    for dotted in preset(args.memory_preset).callbacks:
        module, _, name = dotted.rpartition(".")
        try:
            cls = getattr(import_module(module), name)
        except (ImportError, AttributeError, ValueError) as error:
            raise ValueError(
                f"the preset {args.memory_preset} names {dotted}, which has no home: {error}"
            ) from error
        taken = {
            parameter: getattr(args, option)
            for option, (of, parameter) in _PARAMETERS.items()
            if of == dotted
        }
        callbacks.append(cls(**taken))
    return callbacks


def kind_of(option: "Field[Any]") -> type:
    """The type of an option's value; where the default is None it is text."""
    return str if option.default is None else type(option.default)


def _fits(value: object, kind: type) -> bool:
    """Whether a value is of a type; a whole number also is a float, and a bool is no number."""
    return type(value) is kind or (kind is float and type(value) is int)
