"""Tells the version of the NVIDIA driver, and which cards it shows. Needs no torch and no CUDA."""

from contextlib import suppress

import pynvml  # importing it reads and starts nothing

from trainer_plugins.devices.nvml import NvmlDevice
from trainer_plugins.devices.nvml_cards import installed_cards
from trainer_plugins.devices.nvml_errors import NvmlError, explained
from trainer_plugins.units import size


def driver_version() -> str:
    """Return the version of the driver.

    Raises:
        NvmlError: there is no driver, or it does not tell.
    """
    try:
        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError as error:
        raise explained("version", "the driver", error) from error
    finally:
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def cards_in_words() -> list[str]:
    """Return the name, size and slices of each card, without anything that tells it from others.

    Raises:
        NvmlError: there is no driver, or it cannot be asked.
    """
    lines = []
    for card in installed_cards():
        if card.trouble:
            lines.append("a card for which the driver does not answer")
            continue
        total = ""
        with suppress(NvmlError):
            total = f", {size(NvmlDevice(card.uuid).memory()[0])}"
        slices = f", {len(card.slices)} MIG slices" if card.slices else ""
        lines.append(f"{card.name or 'a card without a name'}{total}{slices}")
    return lines
