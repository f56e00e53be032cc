"""Give a Trainer the callbacks of a preset."""

import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any
from weakref import ref

from trainer_plugins.plug_in.options import DEFAULT_PRESET, callbacks_from_args, memory_arguments

if TYPE_CHECKING:
    from transformers import Trainer, TrainerCallback

# The callbacks that `insert` gave to Trainers, by id: a callback need not be hashable.
_inserted: "dict[int, ref[TrainerCallback]]" = {}


def protect(
    trainer: "Trainer", preset: str = DEFAULT_PRESET, **options: Any
) -> "list[TrainerCallback]":
    """Give one Trainer the callbacks of a preset, but for those whose class it already has.

    Again is harmless.

    They stand behind the Trainer's own flow and in front of its trackers (`report_to`), so that
    what they add to the logs is tracked. They hear `on_init_end` when they are added.

    Args:
        trainer: any `transformers.Trainer`, before it trains.
        preset: which callbacks, see `trainer_plugins.presets`.
        **options: the fields of `MemoryArguments` without `memory_`, as in `warn_fraction=0.8`.

    Returns:
        What was added: nothing, where the Trainer had all of them.

    Raises:
        ValueError: an unknown preset or option, or a bad value. Nothing was added.
        TypeError: this is no Trainer.
    """
    callbacks = callbacks_from_args(memory_arguments(preset, **options))
    if not hasattr(trainer, "callback_handler"):
        raise TypeError(f"protect() takes a transformers.Trainer, got {type(trainer).__name__}")
    return insert(trainer, callbacks)


def insert(trainer: "Trainer", callbacks: "Iterable[TrainerCallback]") -> "list[TrainerCallback]":
    """Insert those callbacks whose class the Trainer does not have, tell them that it is built, and return them.

    Not by `add_callback`: that puts them last, behind the trackers, and a subclass may refuse.
    """
    from transformers import DefaultFlowCallback

    from trainer_plugins.callbacks._run import RunCallback

    present = trainer.callback_handler.callbacks
    missing = [
        each
        for each in callbacks
        if not any(_same_kind(type(each), type(other)) for other in present)
    ]
    flow = [
        index for index, callback in enumerate(present) if isinstance(callback, DefaultFlowCallback)
    ]
    behind = flow[0] + 1 if flow else 0
    for each in missing:
        _inserted[id(each)] = ref(each, functools.partial(_forget, id(each)))
        if isinstance(each, RunCallback):
            each.given_to(trainer.callback_handler, was_inserted)
    present[behind:behind] = missing
    for each in missing:
        each.on_init_end(trainer.args, trainer.state, trainer.control, model=trainer.model)
    return missing


def was_inserted(callback: "TrainerCallback") -> bool:
    """Whether `insert` gave this callback, and not the user."""
    known = _inserted.get(id(callback))
    return known is not None and known() is callback


def _forget(key: int, _: object) -> None:
    _inserted.pop(key, None)


def give_way(trainer: "Trainer", cls: "type[TrainerCallback]") -> None:
    """Take out what `insert` gave, where the user is about to add a callback of that class: the user's is kept."""
    present = trainer.callback_handler.callbacks
    present[:] = [
        other for other in present if not (_same_kind(type(other), cls) and was_inserted(other))
    ]


def _same_kind(one: "type[TrainerCallback]", other: "type[TrainerCallback]") -> bool:
    """Whether one of two classes is the other's kind: two watchdogs would each see half of the peaks."""
    from transformers import TrainerCallback

    return TrainerCallback not in (one, other) and (
        issubclass(one, other) or issubclass(other, one)
    )
