"""Where memory numbers come from. Nothing here is opened at import; `open_device` opens what it is asked for."""

import torch

from trainer_plugins.devices.accelerator import AcceleratorDevice
from trainer_plugins.devices.base import Device, GpuProcess
from trainer_plugins.devices.host import HostDevice, HostFacts
from trainer_plugins.devices.nvml import NvmlDevice, NvmlError

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


def open_device(device: torch.device | str) -> Device:
    """Open the device on which a run trains: a card by torch's name for it, or main memory for `cpu`.

    Raises:
        ValueError: torch has no such device here, or does not count its memory.
    """
    device = torch.device(device)
    if device.type == "cpu":
        return HostDevice()
    here = torch.accelerator.current_accelerator()
    if here is None or here.type != device.type:
        raise ValueError(f"cannot read the memory of {device}: the accelerator here is {here}. Pass device='cpu' or it")
    if device.index is not None and device.index >= torch.accelerator.device_count():
        raise ValueError(
            f"cannot read the memory of {device}: there are {torch.accelerator.device_count()} of its kind"
        )
    try:
        card = AcceleratorDevice(device)
        card.read()
    except (AttributeError, NotImplementedError, RuntimeError) as error:  # MPS, and backends that count nothing
        raise ValueError(f"cannot read the memory of {device}: torch does not count it ({error})") from error
    return card
