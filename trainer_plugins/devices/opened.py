"""Opens the device on which a run trains. Imports torch."""

from weakref import WeakValueDictionary

import torch

from trainer_plugins.devices.accelerator import AcceleratorDevice
from trainer_plugins.devices.base import Device
from trainer_plugins.devices.host import HostDevice

# One card has one AcceleratorDevice per process, however many callbacks look at it: so a failing
# driver is reported once, and asked once.
_open_cards: WeakValueDictionary[str, AcceleratorDevice] = WeakValueDictionary()


def open_device(device: torch.device | str) -> Device:
    """Open the device on which a run trains: a card by torch's name, or main memory for `cpu`.

    A card that is open already is returned as the same object.

    Raises:
        ValueError: torch has no such device here, or does not count its memory.
    """
    device = torch.device(device)
    if device.type == "cpu":
        return HostDevice()
    here = torch.accelerator.current_accelerator()
    if here is None or here.type != device.type:
        raise ValueError(
            f"cannot read the memory of {device}: the accelerator here is {here}."
            f" Pass device='cpu'{f' or device={here.type!r}' if here else ''}"
        )
    if device.index is not None and device.index >= torch.accelerator.device_count():
        raise ValueError(
            f"cannot read the memory of {device}: there are only"
            f" {torch.accelerator.device_count()} {device.type} devices"
        )
    try:
        card = AcceleratorDevice(device)
        card = _open_cards.setdefault(card.name, card)
        card.read()
    # MPS, and backends whose memory counters are missing or make no sense.
    except (AttributeError, NotImplementedError, RuntimeError, ValueError) as error:
        raise ValueError(
            f"cannot read the memory of {device}: torch does not count it ({error})"
        ) from error
    return card
