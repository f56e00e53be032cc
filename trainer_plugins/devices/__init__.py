"""Devices: the sources of memory numbers. Imports torch with the first name that needs it.

To add a kind of device, implement the protocol in `trainer_plugins/devices/base.py`; it has to pass
`tests/devices/test_contract.py`.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from trainer_plugins.devices.base import Device as Device
from trainer_plugins.devices.base import GpuProcess as GpuProcess
from trainer_plugins.devices.host import HostDevice as HostDevice
from trainer_plugins.devices.host import HostFacts as HostFacts
from trainer_plugins.devices.nvml import NvmlDevice as NvmlDevice
from trainer_plugins.devices.nvml import NvmlError as NvmlError

if TYPE_CHECKING:
    from trainer_plugins.devices.accelerator import AcceleratorDevice as AcceleratorDevice
    from trainer_plugins.devices.accelerator import open_device as open_device


def __getattr__(name: str) -> object:
    if name not in ("AcceleratorDevice", "open_device"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.accelerator"), name)
