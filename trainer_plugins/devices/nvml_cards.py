"""Lists the NVIDIA cards of a machine, as the driver numbers them. Needs neither torch nor CUDA."""

from contextlib import suppress
from dataclasses import dataclass

import pynvml  # importing it reads and starts nothing

from trainer_plugins.devices.nvml_errors import explained


@dataclass(frozen=True, slots=True, kw_only=True)
class InstalledCard:
    """Names one card."""

    uuid: str
    name: str = ""
    slices: tuple[str, ...] = ()
    """The UUIDs of its MIG slices."""

    capability: tuple[int, int] | None = None
    """The compute capability; None if the driver does not tell."""

    trouble: str = ""
    """Why the driver does not answer for it; empty if it does."""


def installed_cards() -> tuple[InstalledCard, ...]:
    """List the cards in the order of the driver, which is that of the PCI bus.

    Raises:
        NvmlError: there is no driver, or it cannot be asked.
    """
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise explained("presence", "the cards", error) from error
    try:
        return tuple(_card(index) for index in range(pynvml.nvmlDeviceGetCount()))
    except pynvml.NVMLError as error:
        raise explained("number", "the cards", error) from error
    finally:
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def _card(index: int) -> InstalledCard:
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        uuid = pynvml.nvmlDeviceGetUUID(handle)
    except pynvml.NVMLError as error:
        said = str(explained("name", f"card {index}", error))
        return InstalledCard(uuid=f"card {index}", trouble=said)
    name, capability, slices = "", None, []
    with suppress(pynvml.NVMLError, UnicodeDecodeError):
        name = pynvml.nvmlDeviceGetName(handle)
    with suppress(pynvml.NVMLError):
        major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
        capability = (int(major), int(minor))
    with suppress(pynvml.NVMLError):
        for number in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
            with suppress(pynvml.NVMLError_NotFound):
                part = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)
                slices.append(pynvml.nvmlDeviceGetUUID(part))
    return InstalledCard(uuid=uuid, name=name, capability=capability, slices=tuple(slices))
