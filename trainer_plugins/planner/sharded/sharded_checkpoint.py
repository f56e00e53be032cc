"""Save and resume under FSDP2 by torch's own state dicts, without files. Imports torch."""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from trainer_plugins.planner.tracing.trace import Tracker
from trainer_plugins.planner.trainer import TrainerLike, bare_optimizer

if TYPE_CHECKING:
    import torch
    from torch.distributed.checkpoint.state_dict import StateDictOptions


def save(trainer: TrainerLike, tracker: Tracker) -> None:
    """Make the states of the model and the optimizer, as saving does.

    With FULL_STATE_DICT, each tensor is gathered on the cards, and the first rank keeps it on the
    host. accelerate/utils/fsdp_utils.py, save_fsdp_model and save_fsdp_optimizer.
    """
    from torch.distributed.checkpoint.state_dict import (
        get_model_state_dict,
        get_optimizer_state_dict,
    )

    options = _options(trainer)
    with _on_the_host(trainer, tracker), tracker.during("save"):
        get_model_state_dict(trainer.model, options=options)
        if not trainer.args.save_only_model:
            get_optimizer_state_dict(trainer.model, _optimizers(trainer), options=options)


def resume(trainer: TrainerLike, tracker: Tracker) -> None:
    """Divide the saved states of the optimizer among the ranks, as resuming does.

    accelerate/utils/fsdp_utils.py, load_fsdp_optimizer.
    """
    from torch.distributed.checkpoint.state_dict import (
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    optimizer = _optimizers(trainer)
    with _on_the_host(trainer, tracker):
        with tracker.during("save"):  # in place of a file
            loaded = get_optimizer_state_dict(trainer.model, optimizer, options=_options(trainer))
        with tracker.during("resume"):
            set_optimizer_state_dict(trainer.model, optimizer, loaded, options=_options(trainer))


def _options(trainer: TrainerLike) -> "StateDictOptions":
    from accelerate.utils.fsdp_utils import _prepare_sd_options

    options: StateDictOptions = _prepare_sd_options(_plugin(trainer))
    return options


def _plugin(trainer: TrainerLike) -> Any:
    state: Any = trainer.accelerator.state
    return state.fsdp_plugin


def _optimizers(trainer: TrainerLike) -> "torch.optim.Optimizer | tuple[()]":
    optimizer = bare_optimizer(trainer)
    return () if optimizer is None else optimizer


@contextlib.contextmanager
def _on_the_host(trainer: TrainerLike, tracker: Tracker) -> Iterator[None]:
    """Count the host once per node with FULL_STATE_DICT: only the first rank keeps the states."""
    before = tracker.host.ranks
    if "FULL" in str(_plugin(trainer).state_dict_type):
        tracker.host.ranks = 1
    try:
        yield
    finally:
        tracker.host.ranks = before
