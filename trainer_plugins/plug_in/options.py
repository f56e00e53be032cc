"""Defines the options of the callbacks for command lines, `attach` and `protect`."""

import os
from dataclasses import Field, dataclass, field, fields
from importlib import import_module
from typing import TYPE_CHECKING, Any

from trainer_plugins import presets

if TYPE_CHECKING:
    from transformers import TrainerCallback

Option = bool | int | float | str | os.PathLike[str] | None  # the value of an option
DEFAULT_PRESET = "memory_safe"
PREFIX = "memory_"


# The callback that takes each option, and its parameter. Not in the metadata of the fields, because
# HfArgumentParser passes that to argparse.
_TARGETS = {
    "memory_every_steps": (presets.WATCHDOG, "every_steps"),
    "memory_warn_fraction": (presets.WATCHDOG, "warn_fraction"),
    "memory_act_fraction": (presets.WATCHDOG, "act_fraction"),
    "memory_stop": (presets.WATCHDOG, "stop"),
    "memory_prometheus_dir": (presets.WATCHDOG, "prometheus_dir"),
    "memory_snapshot": (presets.REPORTER, "snapshot"),
    "memory_release_every_steps": (presets.CUDA_CACHE, "interval"),
    "memory_min_reclaimable_fraction": (presets.CUDA_CACHE, "min_reclaimable_fraction"),
    "memory_logits_to": (presets.EVALUATION, "logits_to"),
    "memory_on_refusal": (presets.SURVIVE, "on_refusal"),
    "memory_vouch_for_loss": (presets.SURVIVE, "vouch_for_loss"),
    "memory_rows_at_once": (presets.SURVIVE, "rows_at_once"),
    "memory_stream_base": (presets.STREAM, "when"),
    "memory_resident_layers": (presets.STREAM, "resident_layers"),
}

_NO = "no"
_WORDS = {
    "memory_logits_to": ("cpu", "argmax"),
    "memory_on_refusal": ("warn", "error"),
    "memory_stream_base": (_NO, "needed", "always"),
}
_LADDER_THAT_STREAMS = ("checkpointing", "offload", "stream")


def _option(default: Option, help_text: str) -> Any:
    return field(default=default, metadata={"help": help_text})


@dataclass
class MemoryArguments:
    """Adds the options to HfArgumentParser((TrainingArguments, MemoryArguments)) or TrlParser.

    >>> from transformers import HfArgumentParser
    >>> flags = ["--memory_preset", "survive", "--memory_every_steps", "10"]
    >>> (memory_args,) = HfArgumentParser(MemoryArguments).parse_args_into_dataclasses(flags)
    >>> memory_args.memory_preset, memory_args.memory_every_steps
    ('survive', 10)

    It is not frozen, so that your own dataclass of arguments can inherit from it.

    Raises:
        ValueError: an unknown preset, a value out of range, or an option for a callback that the
            preset does not have.
    """

    memory_preset: str = _option(
        DEFAULT_PRESET,
        "The callbacks: observe, memory_safe, survive, or a preset of an installed package.",
    )
    memory_every_steps: int = _option(
        1, "Read GPU memory every N optimizer steps. (MemoryWatchdog)"
    )
    memory_warn_fraction: float = _option(
        0.90, "Warn at this fraction of the device, 0 to 1. (MemoryWatchdog)"
    )
    memory_act_fraction: float = _option(
        0.97, "Report an error at this fraction of the device, 0 to 1. (MemoryWatchdog)"
    )
    memory_stop: bool = _option(
        False, "On an error, save a checkpoint and stop training on all ranks. (MemoryWatchdog)"
    )
    memory_prometheus_dir: str | None = _option(
        None, "Also write the metrics to this folder, for node_exporter. (MemoryWatchdog)"
    )
    memory_snapshot: bool = _option(
        False, "On CUDA, record allocations, and write torch's snapshot at an OOM. (OOMReporter)"
    )
    memory_release_every_steps: int = _option(
        10, "Consider releasing the cache every N optimizer steps. (CudaCacheCallback)"
    )
    memory_min_reclaimable_fraction: float = _option(
        0.10,
        "Release it if any rank caches this fraction of its card, 0 to 1. (CudaCacheCallback)",
    )
    memory_logits_to: str | None = _option(
        None,
        "Where an evaluation keeps logits that do not fit: cpu, or argmax if the metrics stay"
        " the same. (EvaluationGuard)",
    )
    memory_on_refusal: str = _option(
        "warn", "If survival cannot help this run: warn, or error. (SurviveOOM)"
    )
    memory_vouch_for_loss: bool = _option(
        False,
        "Declare your custom loss a sum or mean over examples: survival tests that, then"
        " splits batches. (SurviveOOM)",
    )
    memory_rows_at_once: int = _option(
        0,
        "Compute at most N of the longest rows at once, with the gradient of the whole"
        " micro-batch; 0: as many as fit. (SurviveOOM)",
    )
    memory_stream_base: str = _option(
        _NO,
        "Keep the frozen base of a LoRA or QLoRA run in main memory: no; needed (if it does"
        " not fit, and as the last step of the preset survive); always. (StreamBase)",
    )
    memory_resident_layers: int = _option(
        2, "Keep at most N layers of that base on the card. (StreamBase)"
    )

    def __post_init__(self) -> None:
        if isinstance(self.memory_prometheus_dir, os.PathLike):
            self.memory_prometheus_dir = os.fspath(self.memory_prometheus_dir)
        self._check_types()
        # Not only in the callbacks: nothing has started yet, and torch is not imported.
        for name in ("memory_every_steps", "memory_release_every_steps"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"{name} is a number of optimizer steps, 1 or more, got {value}")
        warn, act = self.memory_warn_fraction, self.memory_act_fraction
        if not 0 < warn <= act <= 1:
            needs = "0 < memory_warn_fraction <= memory_act_fraction <= 1"
            raise ValueError(f"a budget needs {needs}, got {warn} and {act}")
        for name, words in _WORDS.items():
            value = getattr(self, name)
            if value not in words and value is not None:
                listed = f"{', '.join(words[:-1])} or {words[-1]}"
                raise ValueError(f"{name} is {listed}, got {value!r}")
        if (layers := self.memory_resident_layers) < 1:
            raise ValueError(f"memory_resident_layers counts layers, 1 or more, got {layers}")
        if not 0 <= (got := self.memory_min_reclaimable_fraction) <= 1:
            name = "memory_min_reclaimable_fraction"
            raise ValueError(f"{name} is a fraction of the card, 0 to 1, got {got}")

    def _check_types(self) -> None:
        """Reject values of another type, and options for callbacks that the preset lacks."""
        # StreamBase is always possible.
        callbacks = (*presets.preset(self.memory_preset).callbacks, presets.STREAM)
        for option in fields(MemoryArguments):
            value, kind = getattr(self, option.name), kind_of(option)
            if value == option.default and type(value) is type(option.default):
                continue
            # An int is accepted as a float, and a bool is not a number.
            if type(value) is not kind and not (kind is float and type(value) is int):
                wanted = f"a value of type {kind.__name__}"
                raise ValueError(f"{option.name} takes {wanted}, got {value!r}")
            if option.name in _TARGETS and _TARGETS[option.name][0] not in callbacks:
                name = _TARGETS[option.name][0].rpartition(".")[2]
                missing = f"{name}, which is not in the preset {self.memory_preset}"
                raise ValueError(f"{option.name} needs {missing}")


def memory_arguments(preset: str = DEFAULT_PRESET, **options: Option) -> MemoryArguments:
    """Build the arguments of `attach` and `protect`. Raises ValueError with the nearest name."""
    known = [name.removeprefix(PREFIX) for name in _TARGETS]
    for name in options:
        if name not in known:
            wrong = f"there is no option {name!r}.{presets.nearest(name, known)}"
            raise ValueError(f"{wrong} Known options: {', '.join(known)}")
    given: dict[str, Any] = {PREFIX + name: value for name, value in options.items()}
    return MemoryArguments(memory_preset=preset, **given)


def callbacks_from_args(args: MemoryArguments) -> "list[TrainerCallback]":
    """Build new callbacks: `Trainer(..., callbacks=callbacks_from_args(memory_args))`.

    >>> [type(one).__name__ for one in callbacks_from_args(MemoryArguments("observe"))]
    ['StrategyInForce', 'Preflight', 'MemoryWatchdog', 'OOMReporter']

    Raises:
        ValueError: the preset names a class that cannot be imported.
    """
    callbacks: list[TrainerCallback] = []
    wanted = presets.preset(args.memory_preset).callbacks
    if args.memory_stream_base != _NO and presets.STREAM not in wanted:
        wanted = (*wanted, presets.STREAM)
    for dotted in wanted:
        module, _, name = dotted.rpartition(".")
        try:
            cls = getattr(import_module(module), name)
        except (ImportError, AttributeError, ValueError) as error:
            names = f"the preset {args.memory_preset} names {dotted}"
            raise ValueError(f"{names}, which cannot be imported: {error}") from error
        taken = {
            parameter: getattr(args, option)
            for option, (callback, parameter) in _TARGETS.items()
            if callback == dotted
            and getattr(args, option) != _NO  # then a preset with StreamBase decides
        }
        if dotted == presets.SURVIVE and args.memory_stream_base == "needed":
            taken["ladder"] = _LADDER_THAT_STREAMS
        callbacks.append(cls(**taken))
    return callbacks


def kind_of(option: "Field[Any]") -> type:
    """Return the type of an option's value; an option whose default is None takes text."""
    return str if option.default is None else type(option.default)
