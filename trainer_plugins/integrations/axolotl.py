"""A plugin for axolotl, by the documentation of `BasePlugin`; it has not run in axolotl."""

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
# The keys that we add to axolotl's YAML: the fields of `MemoryArguments`.
MemoryInput = create_model("MemoryInput", **_OPTIONS)  # type: ignore[call-overload]


class MemoryPlugin(BasePlugin):
    """Gives axolotl's Trainer the callbacks of `memory_preset`, with the `memory_` options."""

    def register(self, cfg: Mapping[str, object]) -> None:
        """Refuse a bad option with a ValueError before axolotl loads anything."""
        memory_arguments(**_read_options(cfg))

    def get_input_args(self) -> str:
        """Return the name of the pydantic model of our keys, as axolotl asks for it."""
        return f"{__name__}.MemoryInput"

    def add_callbacks_post_trainer(
        self, cfg: Mapping[str, object], trainer: "Trainer"
    ) -> "list[TrainerCallback]":
        protect(trainer, **_read_options(cfg))
        return []  # axolotl would add them after its trackers


def _read_options(cfg: Mapping[str, Any]) -> dict[str, Any]:
    # All keys with our prefix, so that a misspelt one is reported; axolotl itself has none.
    return {
        name.removeprefix(PREFIX): value
        for name, value in cfg.items()
        if name.startswith(PREFIX) and value is not None
    }
