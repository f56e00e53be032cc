"""Keeps a dry run from pushing, reporting to a tracker, or writing over a real checkpoint."""

import functools
import os
import sys
from pathlib import Path
from typing import Any

from trainer_plugins.testing.drycuda.inside.holes import write_holes

_OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "WANDB_MODE": "disabled",
    "COMET_MODE": "disabled",
    "CLEARML_OFFLINE_MODE": "1",
    "DISABLE_MLFLOW_INTEGRATION": "TRUE",
    "SWANLAB_MODE": "disabled",
    "TRACKIO_DISABLED": "1",
    "AXOLOTL_DO_NOT_TRACK": "1",
    "DO_NOT_TRACK": "1",
}


def protect() -> None:
    """Set trackers and the hub offline, and write holes instead of the bytes of tensors."""
    os.environ.update(_OFFLINE)
    import torch.serialization

    save = torch.serialization.save

    @functools.wraps(save)
    def saved(*args: Any, **kwargs: Any) -> None:
        with torch.serialization.skip_data():
            save(*args, **kwargs)

    torch.save = torch.serialization.save = saved


def save_holes() -> None:
    """Let safetensors write holes."""

    def save_file(
        tensors: dict[str, Any], filename: Any, metadata: dict[str, str] | None = None
    ) -> None:
        write_holes(Path(filename), tensors, metadata)

    # While it is being imported its package does not know it yet.
    sys.modules["safetensors.torch"].save_file = save_file  # type: ignore[attr-defined]


def scratch(output_dir: str) -> str:
    """Return the folder in which a dry run writes what it would write to `output_dir`."""
    folder = Path(os.environ["TRAINER_PLUGINS_DRYCUDA"]) / "output" / Path(output_dir).name
    folder.mkdir(parents=True, exist_ok=True)
    return str(folder)


def protect_arguments() -> None:
    """Let TrainingArguments write to scratch, and report to nothing."""
    from transformers.training_args import TrainingArguments

    made = TrainingArguments.__post_init__

    @functools.wraps(made)
    def post_init(self: Any) -> None:
        self.push_to_hub = False
        self.report_to = "none"
        if self.output_dir:
            self.output_dir = scratch(self.output_dir)
        made(self)

    TrainingArguments.__post_init__ = post_init
