"""AcceleratorDevice: a card, as torch's caching allocator and the driver see it."""

import logging
from collections.abc import Callable
from functools import partial
from time import monotonic
from typing import Any, TypeVar

import torch

from trainer_plugins.devices.base import GpuProcess
from trainer_plugins.devices.nvml import NvmlDevice, NvmlError, NvmlErrorKind
from trainer_plugins.devices.patience import Patience
from trainer_plugins.reading import MemoryReading

T = TypeVar("T")

logger = logging.getLogger(__name__)

LONGEST_WAIT_SECONDS = 60.0

# A healthy driver answers in microseconds, and opens in milliseconds where the process has a CUDA
# context. The library is one in a process, so whoever waits for it waits in one line.
_nvml_calls = Patience("trainer_plugins-nvml", seconds=5.0)


class AcceleratorDevice:
    """One card of this process, of whatever kind `torch.accelerator` drives: the same code runs on CUDA and on simgpu.

    What this process holds comes from torch's allocator. What all processes together hold comes
    from NVML, which answers in about 10 microseconds without waiting for the card; where NVML
    cannot say (missing, a MIG slice, no permission, see `NvmlError`), from `get_memory_info`, which
    is right for the own process too. A failing driver is logged once, asked again later when that
    may help, and never raised.
    """

    def __init__(self, device: torch.device) -> None:
        self._index = (
            torch.accelerator.current_device_index() if device.index is None else device.index
        )
        self._name = f"{device.type}:{self._index}"
        module: Any = torch.get_device_module(device.type)
        # torch.accelerator.get_memory_info came with torch 2.10; before, only the device's own
        # module has it.
        self._memory_info = (
            getattr(torch.accelerator, "get_memory_info", None) or module.mem_get_info
        )
        properties = module.get_device_properties(self._index)
        self._uuid = str(properties.uuid) if hasattr(properties, "uuid") else None
        self._nvml: NvmlDevice | None = None
        self._nvml_wait_seconds = 0.0
        self._ask_nvml_at = 0.0 if self._uuid else float("inf")
        self._ask_nvml_processes = True

    @property
    def name(self) -> str:
        return self._name

    @property
    def uuid(self) -> str | None:
        return self._nvml.uuid if self._nvml else self._uuid

    def read(self) -> MemoryReading:
        reserved_bytes = allocated_bytes = peak_bytes = num_retries = 0
        # torch makes its counters at the first allocation. The flat form,
        # torch.accelerator.memory_stats, costs five times as much as this nested one that it is
        # made from.
        if torch._C._accelerator_isAllocatorInitialized():
            stats = torch._C._accelerator_getDeviceStats(self._index)
            allocated = stats["allocated_bytes"]["all"]
            allocated_bytes, peak_bytes = allocated["current"], allocated["peak"]
            reserved_bytes = stats["reserved_bytes"]["all"]["current"]
            num_retries = stats["num_alloc_retries"]
        total_bytes, free_bytes = self._driver_memory() or self._torch_memory()
        return MemoryReading(
            device=self._name,
            total_bytes=total_bytes,
            free_bytes=free_bytes,
            reserved_bytes=reserved_bytes,
            allocated_bytes=allocated_bytes,
            peak_allocated_bytes=peak_bytes,
            num_alloc_retries=num_retries,
        )

    def reset_peak(self) -> None:
        torch.accelerator.reset_peak_memory_stats(self._index)

    def release_cached(self) -> int:
        before = torch.accelerator.memory_reserved(self._index)
        torch.accelerator.empty_cache()
        return int(before - torch.accelerator.memory_reserved(self._index))

    def processes(self) -> tuple[GpuProcess, ...] | None:
        self._driver_memory()  # opens NVML, unless it is known to be of no use
        if self._nvml is None or not self._ask_nvml_processes:
            return None
        try:
            return self._call_nvml(self._nvml.processes)
        except NvmlError as error:
            self._ask_nvml_processes = not error.permanent
            return None

    def _torch_memory(self) -> tuple[int, int]:
        free_bytes, total_bytes = self._memory_info(self._index)
        return total_bytes, free_bytes

    def _driver_memory(self) -> tuple[int, int] | None:
        """Total and free bytes of the whole card by NVML, or None where it is not the one to ask."""
        if monotonic() < self._ask_nvml_at:
            return None
        try:
            if self._nvml is None:
                self._nvml = self._call_nvml(partial(NvmlDevice.open, str(self._uuid)))
            if self._nvml.is_mig:
                # The driver may name processes of a slice, but only torch's numbers are sure to be
                # the slice's own.
                return None
            memory = self._call_nvml(self._nvml.memory)
        except NvmlError as error:
            self._postpone_nvml(error)
            return None
        self._nvml_wait_seconds = 0.0
        return memory

    def _call_nvml(self, call: Callable[[], T]) -> T:
        """Ask the driver, and wait only so long.

        Raises:
            NvmlError: it does not answer.
        """
        try:
            return _nvml_calls.call(call)
        except TimeoutError as error:
            raise NvmlError(
                NvmlErrorKind.HANGS,
                f"the driver hangs: {error}; read `dmesg` and see whether `nvidia-smi` comes back",
            ) from None

    def _postpone_nvml(self, error: NvmlError) -> None:
        first_time = self._nvml_wait_seconds == 0.0
        self._nvml_wait_seconds = min(LONGEST_WAIT_SECONDS, max(1.0, 2 * self._nvml_wait_seconds))
        self._ask_nvml_at = (
            float("inf") if error.permanent else monotonic() + self._nvml_wait_seconds
        )
        if first_time or error.permanent:
            logger.log(
                logging.INFO if self._nvml is None else logging.WARNING,
                "%s: NVML does not answer (%s); free memory now comes from torch, which counts the same bytes",
                self._name,
                error,
            )
