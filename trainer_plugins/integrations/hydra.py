"""Attaches the callbacks of a Hydra config while a job runs: `+trainer_plugins=memory_safe`."""

import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING

from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainer_plugins.integrations.hydra_keys import refuse_unknown
from trainer_plugins.plug_in.attachment import attached_callbacks, say_at_exit

if TYPE_CHECKING:
    from transformers import TrainerCallback


def callbacks_of(config: DictConfig) -> "list[TrainerCallback]":
    """Build new callbacks from a config's `trainer_plugins.callbacks`, in order, skipping nulls."""
    refuse_unknown(OmegaConf.select(config, "trainer_plugins"))
    entries = OmegaConf.select(config, "trainer_plugins.callbacks") or {}
    return [instantiate(entry) for entry in entries.values() if entry is not None]


class AttachToJob(Callback):
    """Attaches the callbacks of a job's config to every Trainer that the job builds."""

    def __init__(self) -> None:
        self._job = ExitStack()

    def on_job_start(self, config: DictConfig, **kwargs: object) -> None:
        try:
            callbacks_of(config)  # only to find errors: each Trainer gets new ones
            self._job.enter_context(attached_callbacks(lambda: callbacks_of(config)))
        except (HydraException, OmegaConfBaseException, ValueError) as error:
            sys.stderr.write(f"trainer_plugins: {_shorten(error)}\n")
            sys.exit(2)  # Hydra would turn an exception into a warning
        say_at_exit()

    def on_job_end(self, config: DictConfig, job_return: object, **kwargs: object) -> None:
        self._job.close()


def _shorten(error: Exception) -> str:
    """Format an error with its config entry, without the layers that Hydra wraps around it."""
    entry = next((line for line in str(error).splitlines() if line.startswith("full_key: ")), "")
    return " ".join(f"{entry.removeprefix('full_key: ')} {error.__cause__ or error}".split())
