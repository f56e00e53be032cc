"""Gathers what a run is: arguments, model, strategy, versions, card, limits. Imports torch."""

import logging
import os
import platform
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import torch

from trainer_plugins.allocator.variables import Variables
from trainer_plugins.devices import Device
from trainer_plugins.launch.installed import installed_versions
from trainer_plugins.launch.masked import masked, masked_command, masked_text
from trainer_plugins.launch.place import place
from trainer_plugins.record.run_facts import RunFacts
from trainer_plugins.record.timeline import PROCESS

T = TypeVar("T")

logger = logging.getLogger(__name__)


def tried(read: Callable[[], T], default: T) -> T:
    """Read one part of what is written down: a part that fails must not cost the others."""
    try:
        return read()
    except Exception:
        logger.debug("a part of the record of this run is missing", exc_info=True)
        return default


def facts_of_process(
    device: Device | None, rank: int, world_size: int, time_seconds: float, step: int = 0
) -> RunFacts:
    """Gather what is known without a Trainer. It takes some milliseconds.

    Args:
        device: where tensors live; None if that cannot be read.
        rank: this process among those that train together.
        world_size: how many train together.
        time_seconds: when the run began.
        step: optimizer steps that were complete then.
    """
    name = "" if device is None else device.name
    return RunFacts(
        process=PROCESS,
        time_seconds=time_seconds,
        step=step,
        rank=rank,
        world_size=world_size,
        command=masked_command(sys.argv),
        device=name,
        card=tried(lambda: _card(name), ""),
        device_bytes=0 if device is None else tried(lambda: device.read().total_bytes, 0),
        driver=_driver(),
        versions=_versions(),
        allocator=_allocator(os.environ),
        place=tried(place, None),
    )


def arguments_of(args: Any) -> dict[str, object]:
    """Return TrainingArguments as JSON, without secrets."""
    return _as_mapping(args.to_dict() if hasattr(args, "to_dict") else vars(args))


def config_of(model: object) -> dict[str, object]:
    """Return the config of a model as JSON, without secrets; empty if it has none."""
    config = getattr(model, "config", None)
    as_dict = getattr(config, "to_dict", dict)
    return _as_mapping(as_dict())


def _as_mapping(value: object) -> dict[str, object]:
    shown = masked(value)
    return shown if isinstance(shown, dict) else {}


def _card(name: str) -> str:
    if not name or name == "cpu":
        return ""
    device = torch.device(name)
    properties = torch.get_device_module(device.type).get_device_properties(device.index)
    return str(getattr(properties, "name", ""))


def _driver() -> str:
    """Return the version of the card's driver as Linux shows it; empty elsewhere."""
    with suppress(OSError):
        return masked_text(Path("/proc/driver/nvidia/version").read_text().splitlines()[0])
    return ""


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "system": platform.platform()}
    found |= installed_versions()
    found["torch build"] = f"CUDA {torch.version.cuda}, HIP {torch.version.hip}"
    return found


def _allocator(environ: Mapping[str, str]) -> dict[str, str]:
    names = {**Variables.of(environ).texts}
    if "CUDA_VISIBLE_DEVICES" in environ:
        names["CUDA_VISIBLE_DEVICES"] = environ["CUDA_VISIBLE_DEVICES"]
    return {name: masked_text(text) for name, text in names.items()}
