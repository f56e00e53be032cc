"""Where memory numbers come from.

Nothing here is opened at import; `open_device` opens what it is asked for.
"""

from weakref import WeakValueDictionary

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


# One card has one AcceleratorDevice in a process, however many callbacks look at it: what its
# driver fails to tell is said once, and asked once.
_open_cards: WeakValueDictionary[str, AcceleratorDevice] = WeakValueDictionary()


def open_device(device: torch.device | str) -> Device:
    """Open the device on which a run trains: a card by torch's name for it, or main memory for `cpu`.

    For a card that is open already it is the same object.

    Raises:
        ValueError: torch has no such device here, or does not count its memory.
    """
    device = torch.device(device)
    if device.type == "cpu":
        return HostDevice()
    here = torch.accelerator.current_accelerator()
    if here is None or here.type != device.type:
        raise ValueError(
            f"cannot read the memory of {device}: the accelerator here is {here}. Pass device='cpu' or it"
        )
    if device.index is not None and device.index >= torch.accelerator.device_count():
        raise ValueError(
            f"cannot read the memory of {device}: there are {torch.accelerator.device_count()} of its kind"
        )
    try:
        card = AcceleratorDevice(device)
        card = _open_cards.setdefault(card.name, card)
        card.read()
    # MPS, and backends that count nothing, or nothing that makes sense.
    except (AttributeError, NotImplementedError, RuntimeError, ValueError) as error:
        raise ValueError(
            f"cannot read the memory of {device}: torch does not count it ({error})"
        ) from error
    return card
