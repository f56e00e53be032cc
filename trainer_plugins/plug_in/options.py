"""MemoryArguments: one table of options for command lines, `attach` and `protect`."""

import os
from dataclasses import Field, dataclass, field, fields
from importlib import import_module
from typing import TYPE_CHECKING, Any

from trainer_plugins.presets import (
    CUDA_CACHE,
    EVALUATION,
    REPORTER,
    STREAM,
    SURVIVE,
    WATCHDOG,
    nearest,
    preset,
)

if TYPE_CHECKING:
    from transformers import TrainerCallback

Option = bool | int | float | str | os.PathLike[str] | None
"""The value of one option."""

DEFAULT_PRESET = "memory_safe"
PREFIX = "memory_"

# Each option, the class it is for, and the parameter of that class. This is not in the fields'
# metadata because HfArgumentParser passes those to argparse.
_PARAMETERS = {
    "memory_every_steps": (WATCHDOG, "every_steps"),
    "memory_warn_fraction": (WATCHDOG, "warn_fraction"),
    "memory_act_fraction": (WATCHDOG, "act_fraction"),
    "memory_stop": (WATCHDOG, "stop"),
    "memory_prometheus_dir": (WATCHDOG, "prometheus_dir"),
    "memory_snapshot": (REPORTER, "snapshot"),
    "memory_release_every_steps": (CUDA_CACHE, "interval"),
    "memory_min_reclaimable_fraction": (CUDA_CACHE, "min_reclaimable_fraction"),
    "memory_logits_to": (EVALUATION, "logits_to"),
    "memory_on_refusal": (SURVIVE, "on_refusal"),
    "memory_vouch_for_loss": (SURVIVE, "vouch_for_loss"),
    "memory_stream_base": (STREAM, "when"),
    "memory_resident_layers": (STREAM, "resident_layers"),
}

_NO = "no"
_STREAM_BASE = (_NO, "needed", "always")
_LADDER_THAT_STREAMS = ("checkpointing", "offload", "stream")


@dataclass
class MemoryArguments:
    """Holds the options, for HfArgumentParser((TrainingArguments, MemoryArguments)) or TrlParser.

    It is not frozen, so that your own dataclass of arguments can inherit from it.

    Raises:
        ValueError: an unknown preset, a value out of range, or an option for a callback that the
            preset does not have.
    """

    memory_preset: str = field(
        default=DEFAULT_PRESET,
        metadata={
            "help": "Which callbacks: observe, memory_safe, survive, or a preset that an installed"
            " package offers."
        },
    )
    memory_every_steps: int = field(
        default=1,
        metadata={"help": "Read the device every so many optimizer steps. (MemoryWatchdog)"},
    )
    memory_warn_fraction: float = field(
        default=0.90,
        metadata={
            "help": "Warn when this fraction of the device is in use, 0 to 1. (MemoryWatchdog)"
        },
    )
    memory_act_fraction: float = field(
        default=0.97,
        metadata={
            "help": "Report an error from this fraction of the device on, 0 to 1. (MemoryWatchdog)"
        },
    )
    memory_stop: bool = field(
        default=False,
        metadata={
            "help": "On an error, save a checkpoint and stop training on all ranks."
            " (MemoryWatchdog)"
        },
    )
    memory_prometheus_dir: str | None = field(
        default=None,
        metadata={
            "help": "Also write the numbers to this folder, for node_exporter. (MemoryWatchdog)"
        },
    )
    memory_snapshot: bool = field(
        default=False,
        metadata={
            "help": "On CUDA, remember allocations and write torch's snapshot when memory runs out."
            " (OOMReporter)"
        },
    )
    memory_release_every_steps: int = field(
        default=10,
        metadata={"help": "Consider a release every so many optimizer steps. (CudaCacheCallback)"},
    )
    memory_min_reclaimable_fraction: float = field(
        default=0.10,
        metadata={
            "help": "Release if some rank has cached this fraction of its card, 0 to 1."
            " (CudaCacheCallback)"
        },
    )

    memory_logits_to: str | None = field(
        default=None,
        metadata={
            "help": "Where an evaluation keeps logits that do not fit: cpu, or argmax, if the"
            " metrics are the same. (EvaluationGuard)"
        },
    )
    memory_on_refusal: str = field(
        default="warn",
        metadata={
            "help": "What to do if a run's out-of-memory errors cannot be survived: warn, or error."
            " (SurviveOOM)"
        },
    )
    memory_vouch_for_loss: bool = field(
        default=False,
        metadata={
            "help": "Your own loss is a sum or mean over examples: it is checked, then divided."
            " (SurviveOOM)"
        },
    )

    memory_stream_base: str = field(
        default=_NO,
        metadata={
            "help": "Keep the frozen base of a LoRA or QLoRA run in main memory: no; needed, if it"
            " does not fit, and as the last rung of the preset survive; always. (StreamBase)"
        },
    )
    memory_resident_layers: int = field(
        default=2,
        metadata={"help": "How many layers of that base are on the card at most. (StreamBase)"},
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
            # StreamBase is added to any preset.
            if target and target[0] not in (*has, STREAM) and value != option.default:
                name = target[0].rpartition(".")[2]
                raise ValueError(
                    f"{option.name} is for {name}, which is not in the preset {self.memory_preset}"
                )
        # What the callbacks would refuse is refused here, before anything begins and torch is
        # imported.
        for name in ("memory_every_steps", "memory_release_every_steps"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"{name} is a number of optimizer steps, 1 or more, got {getattr(self, name)}"
                )
        if not 0 < self.memory_warn_fraction <= self.memory_act_fraction <= 1:
            raise ValueError(
                "a budget needs 0 < memory_warn_fraction <= memory_act_fraction <= 1, "
                f"got {self.memory_warn_fraction} and {self.memory_act_fraction}"
            )
        if self.memory_logits_to not in (None, "cpu", "argmax"):
            raise ValueError(f"memory_logits_to is cpu or argmax, got {self.memory_logits_to!r}")
        if self.memory_on_refusal not in ("warn", "error"):
            raise ValueError(f"memory_on_refusal is warn or error, got {self.memory_on_refusal!r}")
        if self.memory_stream_base not in _STREAM_BASE:
            raise ValueError(
                f"memory_stream_base is one of {', '.join(_STREAM_BASE)}, got"
                f" {self.memory_stream_base!r}"
            )
        if self.memory_resident_layers < 1:
            raise ValueError(
                f"memory_resident_layers counts layers, 1 or more, got"
                f" {self.memory_resident_layers}"
            )
        if not 0 <= self.memory_min_reclaimable_fraction <= 1:
            got = self.memory_min_reclaimable_fraction
            raise ValueError(
                f"memory_min_reclaimable_fraction is a fraction of the card, 0 to 1, got {got}"
            )


def memory_arguments(preset: str = DEFAULT_PRESET, **options: Option) -> MemoryArguments:
    """Build the arguments that `attach` and `protect` take: a preset, and options without prefix.

    Raises:
        ValueError: an unknown preset or option (the nearest one is named), or a bad value.
    """
    known = [name.removeprefix(PREFIX) for name in _PARAMETERS]
    for name in options:
        if name not in known:
            raise ValueError(
                f"there is no option {name!r}.{nearest(name, known)} Known options:"
                f" {', '.join(known)}"
            )
    given: dict[str, Any] = {PREFIX + name: value for name, value in options.items()}
    return MemoryArguments(memory_preset=preset, **given)


def callbacks_from_args(args: MemoryArguments) -> "list[TrainerCallback]":
    """Make fresh callbacks: `Trainer(..., callbacks=callbacks_from_args(memory_args))`.

    Raises:
        ValueError: the preset names a class that cannot be imported.
    """
    callbacks: list[TrainerCallback] = []
    wanted = preset(args.memory_preset).callbacks
    if args.memory_stream_base != _NO and STREAM not in wanted:
        wanted = (*wanted, STREAM)
    for dotted in wanted:
        module, _, name = dotted.rpartition(".")
        try:
            cls = getattr(import_module(module), name)
        except (ImportError, AttributeError, ValueError) as error:
            raise ValueError(
                f"the preset {args.memory_preset} names {dotted}, which cannot be imported: {error}"
            ) from error
        taken = {
            parameter: getattr(args, option)
            for option, (of, parameter) in _PARAMETERS.items()
            if of == dotted and getattr(args, option) != _NO  # of a preset that has StreamBase
        }
        if dotted == SURVIVE and args.memory_stream_base == "needed":
            taken["ladder"] = _LADDER_THAT_STREAMS
        callbacks.append(cls(**taken))
    return callbacks


def kind_of(option: "Field[Any]") -> type:
    """Return the type of an option's value; an option whose default is None takes text."""
    return str if option.default is None else type(option.default)


def _fits(value: object, kind: type) -> bool:
    """Return whether a value has a type; a whole number is a float too, and a bool is no number."""
    return type(value) is kind or (kind is float and type(value) is int)
