"""AcceleratorDevice: a card, as counted by torch's caching allocator and the driver."""

import logging
from collections.abc import Callable
from functools import partial
from math import inf
from time import monotonic
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import torch

from trainer_plugins.devices.base import Device, GpuProcess
from trainer_plugins.devices.host import HostDevice
from trainer_plugins.devices.nvml import NvmlDevice, NvmlError
from trainer_plugins.devices.patience import Patience
from trainer_plugins.reading import MemoryReading

T = TypeVar("T")

logger = logging.getLogger(__name__)

_PAUSE_SECONDS = 10.0  # before NVML is asked again after a temporary failure

# A healthy driver answers in microseconds, and opens in milliseconds once CUDA has.
_nvml_calls = Patience("trainer_plugins-nvml", seconds=5.0)

_logged: set[tuple[str, str]] = set()  # by card: one that is reopened fails the same way

# All callbacks of a process share a card's device: a failing driver is reported once.
_open_cards: WeakValueDictionary[str, "AcceleratorDevice"] = WeakValueDictionary()


def open_device(device: torch.device | str) -> Device:
    """Open a run's device: a card by torch's name, or `cpu`; ValueError if it is unreadable."""
    device = torch.device(device)
    if device.type == "cpu":
        return HostDevice()
    here = torch.accelerator.current_accelerator()
    if here is None or here.type != device.type:
        raise ValueError(
            f"cannot read the memory of {device}: the accelerator here is {here}."
            f" Pass device='cpu'{f' or device={here.type!r}' if here else ''}"
        )
    num_cards = torch.accelerator.device_count()
    if device.index is not None and device.index >= num_cards:
        raise ValueError(
            f"cannot read the memory of {device}: there are only {num_cards} {device.type} devices"
        )
    try:
        card = AcceleratorDevice(device)
        card = _open_cards.setdefault(card.name, card)
        card.read()
    # MPS, and backends whose memory counters are missing or nonsensical.
    except (AttributeError, NotImplementedError, RuntimeError, ValueError) as error:
        raise ValueError(
            f"cannot read the memory of {device}: torch does not count it ({error})"
        ) from error
    return card


class AcceleratorDevice:
    """Reads one card of this process, of any kind that `torch.accelerator` supports."""

    # torch's allocator counts this process's memory, and NVML everyone's, without a device sync. If
    # NVML cannot answer (missing, a MIG slice, no permission), `get_memory_info` does.

    def __init__(self, device: torch.device) -> None:
        self._index = (
            torch.accelerator.current_device_index() if device.index is None else device.index
        )
        self._type = device.type
        self.name = f"{self._type}:{self._index}"
        properties = torch.get_device_module(self._type).get_device_properties(self._index)
        self._uuid = str(properties.uuid) if hasattr(properties, "uuid") else None
        self._nvml: NvmlDevice | None = None
        self._ask_nvml_at = 0.0 if self._uuid else inf
        self._ask_nvml_processes = True

    def read(self) -> MemoryReading:
        reserved_bytes = allocated_bytes = peak_bytes = num_retries = 0
        # torch creates its counters at the first allocation. torch.accelerator.memory_stats
        # flattens this nested dictionary, at five times the cost.
        if torch._C._accelerator_isAllocatorInitialized():
            stats = torch._C._accelerator_getDeviceStats(self._index)
            allocated = stats["allocated_bytes"]["all"]
            allocated_bytes, peak_bytes = allocated["current"], allocated["peak"]
            reserved_bytes = stats["reserved_bytes"]["all"]["current"]
            num_retries = stats["num_alloc_retries"]
        total_bytes, free_bytes = self._driver_memory() or self._torch_memory()
        return MemoryReading(
            device=self.name,
            total_bytes=total_bytes,
            free_bytes=free_bytes,
            reserved_bytes=reserved_bytes,
            allocated_bytes=allocated_bytes,
            peak_allocated_bytes=peak_bytes,
            num_alloc_retries=num_retries,
        )

    def read_allocated_bytes(self) -> int:
        """Return the bytes of live tensors, as `read` does, without asking the driver."""
        return int(torch.accelerator.memory_allocated(self._index))

    def reset_peak(self) -> None:
        torch.accelerator.reset_peak_memory_stats(self._index)

    def release_cached(self) -> int:
        before = torch.accelerator.memory_reserved(self._index)
        torch.accelerator.empty_cache()
        return int(before - torch.accelerator.memory_reserved(self._index))

    def processes(self) -> tuple[GpuProcess, ...] | None:
        self._driver_memory()  # opens NVML, unless it is known to be useless here
        if self._nvml is None or not self._ask_nvml_processes:
            return None
        try:
            return self._call_nvml(self._nvml.processes)
        except NvmlError as error:
            self._ask_nvml_processes = not error.permanent
            return None

    def _torch_memory(self) -> tuple[int, int]:
        module: Any = torch.get_device_module(self._type)  # torch 2.9 has nothing else
        memory_info = getattr(torch.accelerator, "get_memory_info", None) or module.mem_get_info
        free_bytes, total_bytes = memory_info(self._index)
        return total_bytes, free_bytes

    def _driver_memory(self) -> tuple[int, int] | None:
        if monotonic() < self._ask_nvml_at:
            return None
        try:
            if self._nvml is None:
                self._nvml = self._call_nvml(partial(NvmlDevice.open, str(self._uuid)))
            if self._nvml.is_mig:
                return None  # only torch's numbers are certain to be the slice's own
            return self._call_nvml(self._nvml.memory)
        except NvmlError as error:
            self._ask_nvml_at = inf if error.permanent else monotonic() + _PAUSE_SECONDS
            if (failure := (self.name, str(error))) not in _logged:
                _logged.add(failure)
                logger.log(
                    logging.INFO if self._nvml is None else logging.WARNING,
                    "%s: NVML does not answer (%s); free memory now comes from torch, which counts"
                    " the same bytes",
                    self.name,
                    error,
                )
            return None

    def _call_nvml(self, call: Callable[[], T]) -> T:
        try:
            return _nvml_calls.call(call)
        except TimeoutError as error:
            raise NvmlError(
                f"the driver hangs: {error}; read `dmesg`, and check whether `nvidia-smi` responds"
            ) from None
