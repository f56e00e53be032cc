"""Gives one Trainer the callbacks of a preset."""

import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING
from weakref import ref

from trainer_plugins.plug_in.options import (
    DEFAULT_PRESET,
    Option,
    callbacks_from_args,
    memory_arguments,
)

if TYPE_CHECKING:
    from transformers import Trainer, TrainerCallback

# The callbacks that `insert` gave to Trainers, by id: a callback need not be hashable.
_inserted: "dict[int, ref[TrainerCallback]]" = {}


def protect(
    trainer: "Trainer", preset: str = DEFAULT_PRESET, **options: Option
) -> "list[TrainerCallback]":
    """Give one Trainer those callbacks of a preset whose class it does not have yet.

    A second call is harmless. The callbacks come after the Trainer's own flow and before its
    trackers (`report_to`), so that trackers see what they add to the logs. They get `on_init_end`
    when they are added.

    Args:
        trainer: any `transformers.Trainer`, before it trains.
        preset: which callbacks, see `trainer_plugins.presets`.
        **options: the fields of `MemoryArguments` without `memory_`, such as `warn_fraction=0.8`.

    Returns:
        The callbacks that were added; empty if the Trainer had all of them.

    Raises:
        ValueError: an unknown preset or option, or a bad value. Nothing is added then.
        TypeError: `trainer` is not a Trainer.
    """
    callbacks = callbacks_from_args(memory_arguments(preset, **options))
    if not hasattr(trainer, "callback_handler"):
        raise TypeError(f"protect() takes a transformers.Trainer, got {type(trainer).__name__}")
    return insert(trainer, callbacks)


def insert(trainer: "Trainer", callbacks: "Iterable[TrainerCallback]") -> "list[TrainerCallback]":
    """Insert the callbacks whose class the Trainer lacks, call their `on_init_end`, return them."""
    from transformers import DefaultFlowCallback

    from trainer_plugins.callbacks._run import RunCallback

    present = trainer.callback_handler.callbacks
    kinds = [type(other) for other in present]
    missing = [each for each in callbacks if not any(_same_kind(type(each), k) for k in kinds)]
    flow = [n for n, each in enumerate(present) if isinstance(each, DefaultFlowCallback)]
    behind = flow[0] + 1 if flow else 0
    for each in missing:
        _inserted[id(each)] = ref(each, functools.partial(_inserted.pop, id(each)))
        if isinstance(each, RunCallback):
            each.given_to(trainer.callback_handler, was_inserted)
    # Not by `add_callback`: that adds them last, after the trackers, and a subclass may refuse.
    present[behind:behind] = missing
    for each in missing:
        each.on_init_end(trainer.args, trainer.state, trainer.control, model=trainer.model)
    return missing


def was_inserted(callback: "TrainerCallback") -> bool:
    """Return whether `insert` added this callback, not the user."""
    known = _inserted.get(id(callback))
    return known is not None and known() is callback


def give_way(trainer: "Trainer", cls: "type[TrainerCallback]") -> None:
    """Remove what `insert` added if the user is about to add a callback of that class."""
    present = trainer.callback_handler.callbacks
    present[:] = [
        other for other in present if not (_same_kind(type(other), cls) and was_inserted(other))
    ]


def _same_kind(one: "type[TrainerCallback]", other: "type[TrainerCallback]") -> bool:
    """Return whether one class is the other's kind: two watchdogs would each see half the peaks."""
    from transformers import TrainerCallback

    is_kind = issubclass(one, other) or issubclass(other, one)
    return is_kind and TrainerCallback not in (one, other)
