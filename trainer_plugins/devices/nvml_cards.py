"""Lists the NVIDIA cards of a machine and the driver's version, without torch or CUDA."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import pynvml  # importing it reads and starts nothing

from trainer_plugins.devices.nvml import NvmlDevice, NvmlError, explain_error
from trainer_plugins.units import size


@dataclass(frozen=True, slots=True, kw_only=True)
class InstalledCard:
    """One card."""

    uuid: str
    name: str = ""
    slices: tuple[str, ...] = ()  # UUIDs of its MIG slices
    capability: tuple[int, int] | None = None  # compute capability; None if not reported
    trouble: str = ""  # why the driver does not answer for it; empty if it does


def driver_version() -> str:
    """Return the version of the driver. Raises NvmlError if there is none."""
    with _nvml("version", "the driver"):
        return str(pynvml.nvmlSystemGetDriverVersion())


def list_cards() -> tuple[InstalledCard, ...]:
    """List the cards in PCI bus order. Raises NvmlError if the driver does not answer."""
    with _nvml("number", "the cards"):
        return tuple(_card(index) for index in range(pynvml.nvmlDeviceGetCount()))


def cards_in_words() -> list[str]:
    """Return the name, size and slices of each card, without identifying it."""
    lines = []
    for card in list_cards():
        if card.trouble:
            lines.append("a card for which the driver does not answer")
            continue
        line = card.name or "a card without a name"
        with suppress(NvmlError):
            line += f", {size(NvmlDevice(card.uuid).memory()[0])}"
        lines.append(line + (f", {len(card.slices)} MIG slices" if card.slices else ""))
    return lines


@contextmanager
def _nvml(what: str, uuid: str) -> Iterator[None]:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise explain_error("presence", uuid, error) from error
    try:
        yield
    except pynvml.NVMLError as error:
        raise explain_error(what, uuid, error) from error
    finally:
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def _card(index: int) -> InstalledCard:
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        uuid = pynvml.nvmlDeviceGetUUID(handle)
    except pynvml.NVMLError as error:
        trouble = str(explain_error("name", f"card {index}", error))
        return InstalledCard(uuid=f"card {index}", trouble=trouble)
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
