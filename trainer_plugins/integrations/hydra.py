"""What Hydra does for `+trainer_plugins=memory_safe`: it attaches the callbacks of the config while a job runs."""

import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainer_plugins.plug_in.attachment import attached_callbacks, say_at_exit

if TYPE_CHECKING:
    from transformers import TrainerCallback


def callbacks_of(config: DictConfig) -> "list[TrainerCallback]":
    """Fresh callbacks from the mapping `trainer_plugins.callbacks` of a config, in its order, but for null entries.

    Raises:
        hydra.errors.InstantiationException: an entry cannot be made.
    """
    entries = OmegaConf.select(config, "trainer_plugins.callbacks") or {}
    return [instantiate(entry) for entry in entries.values() if entry is not None]


class AttachToJob(Callback):
    """A callback of Hydra: every Trainer that a job builds in its process gets the callbacks of the job's config.

    Jobs of a multirun that share a process have each their own. A config from which they cannot be
    made ends the job before it begins, with one line and exit code 2: of an exception Hydra would
    only warn.
    """

    def __init__(self) -> None:
        self._job = ExitStack()

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        try:
            callbacks_of(config)  # to see that it works: each Trainer gets its own
            self._job.enter_context(attached_callbacks(lambda: callbacks_of(config)))
        except (HydraException, OmegaConfBaseException, ValueError) as error:
            sys.stderr.write(f"trainer_plugins: {_in_one_line(error)}\n")
            sys.exit(2)
        say_at_exit()

    def on_job_end(self, config: DictConfig, job_return: Any, **kwargs: Any) -> None:
        self._job.close()


def _in_one_line(error: Exception) -> str:
    """What went wrong, without the layers that Hydra puts around it, and in which entry."""
    entry = next((line for line in str(error).splitlines() if line.startswith("full_key: ")), "")
    return " ".join(f"{entry.removeprefix('full_key: ')} {error.__cause__ or error}".split())
