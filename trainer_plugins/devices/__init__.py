"""Devices: where memory numbers come from.

Importing this opens nothing; `open_device` opens the device that it is asked for. torch is imported
with the first name that needs it.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from trainer_plugins.devices.base import Device, GpuProcess
from trainer_plugins.devices.host import HostDevice, HostFacts
from trainer_plugins.devices.nvml import NvmlDevice, NvmlError

if TYPE_CHECKING:
    from trainer_plugins.devices.accelerator import AcceleratorDevice
    from trainer_plugins.devices.opened import open_device

__all__ = [
    "AcceleratorDevice",
    "Device",
    "GpuProcess",
    "HostDevice",
    "HostFacts",
    "NvmlDevice",
    "NvmlError",
    "open_device",
]

_NEED_TORCH = {"AcceleratorDevice": "accelerator", "open_device": "opened"}


def __getattr__(name: str) -> object:
    if name not in _NEED_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(f"{__name__}.{_NEED_TORCH[name]}"), name)
    return value
