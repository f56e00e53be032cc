"""Adds the callbacks of a preset to one Trainer, or to every Trainer that this process builds."""

import atexit
import functools
import gc
import inspect
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from operator import is_
from typing import TYPE_CHECKING, Any

from trainer_plugins._site import trainer_plugins_on_import as on_import
from trainer_plugins.oldest import too_old
from trainer_plugins.plug_in.options import (
    DEFAULT_PRESET,
    Option,
    callbacks_from_args,
    memory_arguments,
)
from trainer_plugins.plug_in.reported import TRAINER, report

if TYPE_CHECKING:
    from transformers import Trainer, TrainerCallback

_INSERTED = "_was_inserted"  # attribute of the callbacks that `insert` added to Trainers


def protect(
    trainer: "Trainer", preset: str = DEFAULT_PRESET, **options: Option
) -> "list[TrainerCallback]":
    """Add to one Trainer those callbacks of a preset whose class it does not have yet.

        protect(trainer, "survive", warn_fraction=0.8)

    You can call it twice without harm. The callbacks go behind the Trainer's own flow callback and
    before its trackers (`report_to`), so that trackers see what they add to the logs. They get
    `on_init_end` when they are added.

    Args:
        trainer: any `transformers.Trainer`, before it trains.
        preset: the name of a preset, see `trainer_plugins.presets`.
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
    from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback

    from trainer_plugins.callbacks._run import wrap_once

    wrap_once("add_callback", CallbackHandler, _give_way, CallbackHandler)
    present = trainer.callback_handler.callbacks
    kinds = [type(other) for other in present]
    missing = [each for each in callbacks if not any(_same_kind(type(each), k) for k in kinds)]
    flow = [n for n, each in enumerate(present) if isinstance(each, DefaultFlowCallback)]
    behind = flow[0] + 1 if flow else 0
    for each in missing:
        vars(each)[_INSERTED] = True
    # Not by `add_callback`: that adds them last, after the trackers, and a subclass may refuse.
    present[behind:behind] = missing
    for each in missing:
        each.on_init_end(trainer.args, trainer.state, trainer.control, model=trainer.model)
    report(TRAINER)
    return missing


def _give_way(add: Callable[..., None], handler: Any, callback: Any) -> None:
    """Add a user's callback; ours of its class give way to it, unless they are at work."""
    from trainer_plugins.upkeep.generation import inside_training

    kind = callback if isinstance(callback, type) else type(callback)
    if not inside_training():
        handler.callbacks[:] = [
            each
            for each in handler.callbacks
            if not (hasattr(each, _INSERTED) and _same_kind(type(each), kind))
        ]
    add(handler, callback)


def _same_kind(one: "type[TrainerCallback]", other: "type[TrainerCallback]") -> bool:
    """Return whether one class derives from the other: two watchdogs would see half the peaks."""
    from transformers import TrainerCallback

    is_kind = issubclass(one, other) or issubclass(other, one)
    return is_kind and TrainerCallback not in (one, other)


logger = logging.getLogger(__name__)

_TRAINER_MODULE = "transformers.trainer"


class _State:
    make: "Callable[[], list[TrainerCallback]] | None" = None
    waits_for_import = False
    has_failed = False
    num_built = 0
    wrapper: "Callable[..., None] | None" = None  # ours, around `Trainer.__init__`


_state = _State()


def attach(preset: str = DEFAULT_PRESET, **options: Option) -> None:
    """Add the callbacks of a preset to every Trainer built from now on, as `protect` does.

    >>> attach("survive", warn_fraction=0.8)  # before you build the Trainer
    >>> detach()  # later Trainers get nothing

    Each Trainer gets fresh callbacks. If you pass a callback of the same class yourself, yours is
    kept instead of ours. Attaching again replaces the preset and the options; existing Trainers
    stay as they are. This imports neither torch nor transformers: if `transformers.trainer` is not
    imported yet, it waits for that.

    Args:
        preset: the name of a preset, see `trainer_plugins.presets`.
        **options: the fields of `MemoryArguments` without `memory_`, such as `warn_fraction=0.8`.

    Raises:
        ValueError: an unknown preset or option, a bad value, or an old transformers. No change.
    """
    _attach(functools.partial(callbacks_from_args, memory_arguments(preset, **options)))


def is_attached() -> bool:
    """Return whether anything is attached."""
    return _state.make is not None


def detach() -> None:
    """Stop adding callbacks to new Trainers, and restore `Trainer.__init__`.

    If other code has wrapped it since, our wrapper stays, and does nothing.
    """
    _state.make = None
    trainer, ours = _trainer_class(), _state.wrapper
    if trainer is not None and ours is not None and trainer.__init__ is ours:
        trainer.__init__ = inspect.getattr_static(ours, "__wrapped__")
        _state.wrapper = None


def attached(preset: str = DEFAULT_PRESET, **options: Option) -> AbstractContextManager[None]:
    """Call `attach` for the length of a `with` block, then restore the previous attachment.

        with attached("survive"):
            main()  # a library that builds its own Trainer

    Raises:
        ValueError: as for `attach`.
    """
    return attached_callbacks(
        functools.partial(callbacks_from_args, memory_arguments(preset, **options))
    )


@contextmanager
def attached_callbacks(make: "Callable[[], list[TrainerCallback]]") -> Iterator[None]:
    """Attach callbacks for a `with` block: each Trainer gets the result of calling `make()`."""
    before = _state.make
    _attach(make)
    try:
        yield
    finally:
        if before is None:
            detach()
        else:
            _attach(before)


@functools.cache
def say_at_exit() -> None:
    """Report on stderr, once, when this process ends, if it built no Trainer."""
    pid = os.getpid()

    def say() -> None:
        if _state.num_built or os.getpid() != pid:  # a fork inherits this function
            return
        if hasattr(sys, "last_type"):  # it died before: its own traceback explains why
            return
        processes = sys.modules.get("multiprocessing.process")
        if processes is not None and processes.parent_process() is not None:
            return  # a worker process
        sys.stderr.write(
            "trainer_plugins: nothing was attached: this process built no transformers.Trainer,"
            " and a custom training loop takes no callbacks\n"
        )

    atexit.register(say)


def _attach(make: "Callable[[], list[TrainerCallback]]") -> None:
    if why := too_old("transformers"):
        raise ValueError(why)
    _state.make = make
    if _trainer_class() is not None:
        _wrap()
    elif not _state.waits_for_import:
        _state.waits_for_import = True
        on_import.call_when_imported(_TRAINER_MODULE, _wrap)


def _wrap() -> None:
    trainer = _trainer_class()
    if trainer is None or _state.make is None:
        return
    init, ours = trainer.__init__, _state.wrapper
    if ours is None or inspect.unwrap(init, stop=functools.partial(is_, ours)) is not ours:
        _warn_of_those_built(trainer)
        _state.wrapper = on_import.hide_from_warnings(_around_init(init))
        trainer.__init__ = _state.wrapper


def _around_init(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def __init__(self: "Trainer", *args: object, **kwargs: object) -> None:  # noqa: N807
        if _state.make is None:
            return init(self, *args, **kwargs)
        # `StreamBase` finds itself in this variable, by its name, when the Trainer moves its model.
        callbacks: list[TrainerCallback] = []
        with _harmless("a Trainer"):
            callbacks = _state.make()
        init(self, *args, **kwargs)
        _state.num_built += 1
        with _harmless(type(self).__name__):
            insert(self, callbacks)
        return None

    return __init__


@contextmanager
def _harmless(who: str) -> Iterator[None]:
    """Log an error of a custom preset or an unusual Trainer: it must not stop training."""
    try:
        yield
    except Exception:
        if not _state.has_failed:
            _state.has_failed = True
            logger.exception("%s trains without our callbacks (logged once)", who)


def _trainer_class() -> "type[Trainer] | None":
    return getattr(sys.modules.get(_TRAINER_MODULE), "Trainer", None)


def _warn_of_those_built(trainer: "type[Trainer]") -> None:
    trainers = [thing for thing in gc.get_objects() if issubclass(type(thing), trainer)]
    handlers = [each.callback_handler for each in trainers if hasattr(each, "callback_handler")]
    built = sum(not any(hasattr(c, _INSERTED) for c in each.callbacks) for each in handlers)
    if built:
        logger.warning(
            "%d Trainer%s built before attach(), which reaches only later ones. For such a"
            " Trainer, call trainer_plugins.protect(trainer)",
            built,
            " was" if built == 1 else "s were",
        )
