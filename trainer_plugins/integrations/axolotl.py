"""A plugin for axolotl, written from the documentation of `BasePlugin`; never run in axolotl."""

from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from axolotl.integrations.base import BasePlugin
from pydantic import create_model

from trainer_plugins.plug_in.attachment import protect
from trainer_plugins.plug_in.options import PREFIX, MemoryArguments, kind_of, memory_arguments

if TYPE_CHECKING:
    from transformers import Trainer, TrainerCallback

_OPTIONS = {option.name: (kind_of(option) | None, None) for option in fields(MemoryArguments)}
# The keys we add to axolotl's YAML: the fields of `MemoryArguments`.
MemoryInput = create_model("MemoryInput", **_OPTIONS)  # type: ignore[call-overload]


class MemoryPlugin(BasePlugin):
    """Adds the callbacks of `memory_preset` to axolotl's Trainer, with the `memory_` options."""

    def register(self, cfg: Mapping[str, object]) -> None:
        """Reject a bad option with a ValueError before axolotl loads anything."""
        memory_arguments(**_read_options(cfg))

    def get_input_args(self) -> str:
        """Return the import path of the pydantic model with our keys, as axolotl expects."""
        return f"{__name__}.MemoryInput"

    def add_callbacks_post_trainer(
        self, cfg: Mapping[str, object], trainer: "Trainer"
    ) -> "list[TrainerCallback]":
        protect(trainer, **_read_options(cfg))
        return []  # axolotl would add them after its trackers


def _read_options(cfg: Mapping[str, Any]) -> dict[str, Any]:
    # Every key with our prefix, so that misspelt ones are reported. axolotl has none itself.
    return {
        name.removeprefix(PREFIX): value
        for name, value in cfg.items()
        if name.startswith(PREFIX) and value is not None
    }
