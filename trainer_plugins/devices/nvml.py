"""NvmlDevice: a card's memory as the driver reports it through NVML, for all processes."""

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol, TypeVar

import psutil
import pynvml  # importing it reads and starts nothing

from trainer_plugins.devices.base import GpuProcess
from trainer_plugins.devices.nvml_errors import NvmlError, NvmlErrorKind, explained
from trainer_plugins.reading import MemoryReading

__all__ = ["MAX_PID", "NvmlDevice", "NvmlError", "NvmlErrorKind"]

T = TypeVar("T")

MAX_PID = 1 << 22
"""No pid on 64-bit Linux is this high: PID_MAX_LIMIT in linux/threads.h."""


class _MemoryInfo(Protocol):
    """Names what we use of pynvml's answer about memory, in bytes."""

    total: int
    free: int


class _ProcessRow(Protocol):
    """Names what we use of one row of pynvml's list of processes."""

    pid: int
    usedGpuMemory: int | None  # noqa: N815 - pynvml's name; in bytes, None if not available


class NvmlDevice:
    """Reads one card, or one MIG slice, from its driver; needs neither torch nor CUDA.

    It finds the card by UUID, never by index: NVML numbers cards by PCI address, CUDA by speed
    unless told otherwise (pytorch #86539). It never waits for the card. Every failure is an
    `NvmlError`. A forked child finds the card again by itself.
    """

    def __init__(self, uuid: str, name: str | None = None) -> None:
        """Open the card with exactly this UUID; `open` also accepts torch's bare form."""
        self._uuid = uuid
        self._name = name or uuid
        self._peak_bytes = 0
        self._memory_version: int | None = pynvml.nvmlMemory_v2
        self._handle: object = None
        self._opened_in_pid: int | None = None
        self._connect()

    @classmethod
    def open(cls, uuid: str, name: str | None = None) -> "NvmlDevice":
        """Open a card by its UUID.

        Args:
            uuid: as `nvidia-smi -L` prints it, `GPU-…` or `MIG-…`, or bare as torch has it: in a
                MIG slice `torch.cuda.get_device_properties(i).uuid` is the slice's
                (cuDeviceGetUuid_v2), elsewhere the card's. It must be complete: NVML does not take
                a prefix, which CUDA_VISIBLE_DEVICES may hold (vLLM #51677).
            name: the device name in readings, such as `cuda:0`; None takes the UUID.

        Raises:
            NvmlError: there is no such card, or the driver does not answer; see its `kind`.
        """
        if uuid.startswith(("GPU-", "MIG-")):
            return cls(uuid, name)
        try:
            card = cls(f"GPU-{uuid}", name)
        except NvmlError as error:
            if error.kind is not NvmlErrorKind.NOT_FOUND:
                raise
            card = None
        if card is None:
            return cls(f"MIG-{uuid}", name)
        if card._has_slices():
            card.close()
            raise NvmlError(
                NvmlErrorKind.NOT_FOUND,
                f"GPU-{uuid} is divided into MIG slices, and it is unclear which one is meant; open"
                " the slice by its own UUID, MIG-…, from `nvidia-smi -L`",
            )
        return card

    @property
    def name(self) -> str:
        return self._name

    @property
    def uuid(self) -> str:
        return self._uuid

    @property
    def is_mig(self) -> bool:
        """Return whether this is a MIG slice; its totals and processes are the slice's."""
        return self._uuid.startswith("MIG-")

    def memory(self) -> tuple[int, int]:
        """Return total and free bytes; it takes about 12 us with a real driver (MangoHud #2104).

        The total is what processes can use, without the 300 to 600 MiB that the driver keeps for
        itself. Drivers before 510 only have version 1 of the call: its total includes that part,
        which counts as used.

        Raises:
            NvmlError: the driver does not answer, or its numbers are impossible.
        """
        info = self._ask("memory", self._ask_memory)
        total_bytes, free_bytes = info.total - getattr(info, "reserved", 0), info.free
        if not 0 <= free_bytes <= total_bytes or not total_bytes:
            raise NvmlError(
                NvmlErrorKind.NONSENSE,
                f"the driver reports {free_bytes} of {total_bytes} bytes of {self._uuid} as free,"
                " which cannot be true; update the driver, or nvidia-ml-py if that is older",
            )
        return total_bytes, free_bytes

    def read(self) -> MemoryReading:
        """Take a reading; `reserved_bytes` is what the driver lists for us, including the context.

        It is 0 if the driver lists nothing. This asks for the list of processes: `memory` is
        cheaper if only the card's own numbers matter.

        Raises:
            NvmlError: the driver does not answer.
        """
        total_bytes, free_bytes = self.memory()
        processes = self._processes(total_bytes, named=False) or ()
        own_bytes = sum(each.used_bytes or 0 for each in processes if each.pid == os.getpid())
        self._peak_bytes = max(self._peak_bytes, own_bytes)
        return MemoryReading(
            device=self._name,
            total_bytes=total_bytes,
            free_bytes=free_bytes,
            reserved_bytes=own_bytes,
            allocated_bytes=own_bytes,
            peak_allocated_bytes=self._peak_bytes,
        )

    def reset_peak(self) -> None:
        self._peak_bytes = 0

    def release_cached(self) -> int:
        """Return 0: only a process's own allocator can release its memory."""
        return 0

    def processes(self) -> tuple[GpuProcess, ...] | None:
        """List the compute processes on the card; None if they are unknown.

        None means no permission, not supported, or a list with impossible numbers. An empty list
        does not mean an idle card: drivers leave out processes outside the container. We do not ask
        for graphics processes: that call holds the driver's lock for milliseconds, during which no
        process can launch a kernel (MangoHud #2104).

        Raises:
            NvmlError: the driver does not answer now, or the card is lost.
        """
        total_bytes, _free_bytes = self.memory()
        return self._processes(total_bytes, named=True)

    def close(self) -> None:
        """End this device's use of NVML, which counts its users; the next question reopens it."""
        if self._opened_in_pid == os.getpid():
            self._opened_in_pid = None
            with suppress(pynvml.NVMLError):  # other code has shut it down already
                pynvml.nvmlShutdown()

    def __getstate__(self) -> dict[str, object]:
        """Return the state without the handle: a copy opens the card for itself."""
        return {**self.__dict__, "_handle": None, "_opened_in_pid": None}

    def _processes(self, total_bytes: int, *, named: bool) -> tuple[GpuProcess, ...] | None:
        try:
            rows = self._ask("processes", self._ask_processes)
        except NvmlError as error:
            if error.kind not in (NvmlErrorKind.NO_PERMISSION, NvmlErrorKind.NOT_SUPPORTED):
                raise
            return None
        used_bytes: dict[int, int | None] = {}
        for row in rows:
            if row.pid >= MAX_PID or (row.usedGpuMemory or 0) > total_bytes:
                # The rows were decoded with a wrong layout; even those that look right may not be.
                return None
            if row.pid == 0:
                continue  # a process without a number in this container
            # A process may be listed several times, each time with all its memory, because the
            # driver compares pids of different namespaces (open-gpu-kernel-modules, gpu_rmapi.c).
            # So take the largest, not the sum.
            seen = used_bytes.get(row.pid)
            used_bytes[row.pid] = (
                row.usedGpuMemory if seen is None else max(seen, row.usedGpuMemory or 0)
            )
        return tuple(
            GpuProcess(pid, num_bytes, self._process_name(pid) if named else None)
            for pid, num_bytes in used_bytes.items()
        )

    def _process_name(self, pid: int) -> str | None:
        with suppress(psutil.Error):  # it ended or is outside the container; the driver may know it
            return str(psutil.Process(pid).name())
        # pynvml decodes strictly, and a name may be any bytes.
        with suppress(pynvml.NVMLError, UnicodeDecodeError):
            return pynvml.nvmlSystemGetProcessName(pid) or None
        return None

    def _ask_memory(self, handle: object) -> _MemoryInfo:
        # Version 2 reports the driver's own reserve separately. Without it, use version 1 (None).
        info: _MemoryInfo
        try:
            info = pynvml.nvmlDeviceGetMemoryInfo(handle, version=self._memory_version)
        except (pynvml.NVMLError_FunctionNotFound, pynvml.NVMLError_NotSupported):
            if self._memory_version is None:
                raise
            self._memory_version = None
            info = pynvml.nvmlDeviceGetMemoryInfo(handle)
        return info

    def _ask_processes(self, handle: object) -> Sequence[_ProcessRow]:
        # Version 2 has the same layout in all drivers; version 3 had another one from 535.43 to
        # 535.86 (gpustat #161). pynvml's unversioned name is version 3; if that is missing, it
        # raises something other than NVMLError. The detail list of pynvml 13.615 raises TypeError
        # if bytes are N/A.
        rows: Sequence[_ProcessRow]
        try:
            rows = pynvml.nvmlDeviceGetComputeRunningProcesses_v2(handle)
        except pynvml.NVMLError_FunctionNotFound:
            rows = pynvml.nvmlDeviceGetComputeRunningProcesses_v3(handle)
        return rows

    def _has_slices(self) -> bool:
        try:
            current, _pending = self._ask("MIG mode", pynvml.nvmlDeviceGetMigMode)
        except NvmlError as error:
            if error.kind is not NvmlErrorKind.NOT_SUPPORTED:
                raise
            return False  # a card without MIG
        return bool(current)

    def _connect(self) -> None:
        """Initialise NVML in this process and find the card."""
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            raise explained("presence", self._uuid, error) from error
        try:
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(self._uuid)
        except pynvml.NVMLError as error:
            pynvml.nvmlShutdown()
            # NVML's answer to a text that is not a UUID at all.
            if error.value == pynvml.NVML_ERROR_INVALID_ARGUMENT:
                error = pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
            raise explained("presence", self._uuid, error) from error
        self._opened_in_pid = os.getpid()

    def _ask(self, what: str, query: Callable[[object], T]) -> T:
        """Run a query on the card; the message of an error names `what` it asked for."""
        if self._opened_in_pid != os.getpid():
            # A forked child cannot rely on its parent's handle and initialisation.
            self._connect()
        try:
            with suppress(pynvml.NVMLError_Uninitialized):
                return query(self._handle)
            self._connect()  # other code in this process has shut NVML down once too often
            return query(self._handle)
        except pynvml.NVMLError as error:
            raise explained(what, self._uuid, error) from error
