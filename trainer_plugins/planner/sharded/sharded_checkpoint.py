"""Saving and resuming under FSDP2: torch's own state dicts, without the files. Imports torch."""

import contextlib
from collections.abc import Iterator
from typing import Any

from trainer_plugins.planner.tracing.trace import Tracker


def save(trainer: Any, tracker: Tracker) -> None:
    """accelerate/utils/fsdp_utils.py, save_fsdp_model and save_fsdp_optimizer: states are made, written, and dropped.

    As FULL_STATE_DICT each tensor is gathered on the cards, and the first rank keeps it on the
    host.
    """
    from torch.distributed.checkpoint.state_dict import (
        get_model_state_dict,
        get_optimizer_state_dict,
    )

    options = _options(trainer)
    with _on_the_host(trainer, tracker), tracker.during("save"):
        get_model_state_dict(trainer.model, options=options)
        if not trainer.args.save_only_model:
            get_optimizer_state_dict(trainer.model, _optimizer(trainer), options=options)


def resume(trainer: Any, tracker: Tracker) -> None:
    """accelerate/utils/fsdp_utils.py, load_fsdp_optimizer: what was saved is dealt out again."""
    from torch.distributed.checkpoint.state_dict import (
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    optimizer = _optimizer(trainer)
    with _on_the_host(trainer, tracker):
        with tracker.during("save"):  # in place of a file
            loaded = get_optimizer_state_dict(trainer.model, optimizer, options=_options(trainer))
        with tracker.during("resume"):
            set_optimizer_state_dict(trainer.model, optimizer, loaded, options=_options(trainer))


def _options(trainer: Any) -> Any:
    from accelerate.utils.fsdp_utils import _prepare_sd_options

    return _prepare_sd_options(trainer.accelerator.state.fsdp_plugin)


def _optimizer(trainer: Any) -> Any:
    return getattr(trainer.optimizer, "optimizer", trainer.optimizer)


@contextlib.contextmanager
def _on_the_host(trainer: Any, tracker: Tracker) -> Iterator[None]:
    """As FULL_STATE_DICT only the first rank has it there."""
    before = tracker.host_ranks
    if "FULL" in str(trainer.accelerator.state.fsdp_plugin.state_dict_type):
        tracker.host_ranks = 1
    try:
        yield
    finally:
        tracker.host_ranks = before
