"""NvmlDevice: a card as the driver sees it, through NVML.

Every process's memory, without CUDA and without waiting.
"""

import os
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from typing import Any, TypeVar

import psutil
import pynvml  # reads and starts nothing by being imported

from trainer_plugins.devices.base import GpuProcess
from trainer_plugins.reading import MemoryReading

T = TypeVar("T")

MAX_PID = 1 << 22
"""No process of 64-bit Linux has this number or a higher one: PID_MAX_LIMIT in linux/threads.h."""


class NvmlErrorKind(Enum):
    """The ways in which the driver fails to answer, told apart by what one can do about them."""

    MISSING = "missing"
    """There is no driver library."""

    DRIVER = "driver"
    """The library is there and cannot talk to the kernel driver: not loaded, or of another version."""

    NOT_SUPPORTED = "not supported"
    """This driver or card does not tell that."""

    NO_PERMISSION = "no permission"
    """This user, or this container, may not know that."""

    LOST = "lost"
    """The card has fallen off the bus, wants a reset, or is no longer the device that was opened."""

    TIMEOUT = "timeout"
    """No answer this time: the driver is busy, or fails for a reason that it does not name."""

    NOT_FOUND = "not found"
    """No card has that UUID, or this process may not see it."""

    NONSENSE = "nonsense"
    """It says what cannot be, such as more free memory than there is."""

    HANGS = "hangs"
    """It has not answered for seconds, and may never do so."""


class NvmlError(RuntimeError):
    """The driver did not answer. The message says what is so and what to do."""

    def __init__(self, kind: NvmlErrorKind, message: str) -> None:
        super().__init__(kind, message)
        self.kind = kind

    def __str__(self) -> str:
        return str(self.args[1])

    @property
    def permanent(self) -> bool:
        """Whether asking again is of no use in this process."""
        return self.kind is not NvmlErrorKind.TIMEOUT


class NvmlDevice:
    """One card, or one MIG slice of a card, by the numbers of its driver: a `Device` without torch and without CUDA.

    It is found by UUID and never by index, because NVML numbers cards by PCI address and CUDA,
    unless told otherwise, by speed (pytorch #86539). Any failure is an `NvmlError`. A forked child
    finds the card again by itself.
    """

    def __init__(self, uuid: str, name: str | None = None) -> None:
        """Open the card with exactly this UUID; see `open` for what else may name it."""
        self._uuid = uuid
        self._name = name or uuid
        self._peak_bytes = 0
        self._memory_version: int | None = pynvml.nvmlMemory_v2
        self._handle: Any = None
        self._opened_in_pid: int | None = None
        self._connect()

    @classmethod
    def open(cls, uuid: str, name: str | None = None) -> "NvmlDevice":
        """Open a card by its UUID.

        Args:
            uuid: as `nvidia-smi -L` prints it, `GPU-…` or `MIG-…`, or bare as torch has it: in a
                MIG slice `torch.cuda.get_device_properties(i).uuid` is the slice's
                (cuDeviceGetUuid_v2), elsewhere the card's. The whole of it: CUDA_VISIBLE_DEVICES
                may hold a prefix, NVML takes none (vLLM #51677).
            name: what readings call it, as in `cuda:0`. None: its UUID.

        Raises:
            NvmlError: there is no such card or the driver cannot be asked; its `kind` says which.
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
        if card._is_cut_into_slices():
            card.close()
            raise NvmlError(
                NvmlErrorKind.NOT_FOUND,
                f"GPU-{uuid} is cut into MIG slices, and which of them is meant cannot be told; open that by its own"
                " UUID, MIG-…, from `nvidia-smi -L`",
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
        """Whether this is a MIG slice: totals and processes are then the slice's."""
        return self._uuid.startswith("MIG-")

    def memory(self) -> tuple[int, int]:
        """Return total and free bytes, cheaply enough for every step: about 12 us with a real driver (MangoHud #2104).

        The total is what processes can take, without the part that the driver keeps for itself, 300
        to 600 MiB. Drivers before 510 have only version 1 of the call: there that part is in the
        total, and counts as used.

        Raises:
            NvmlError: the driver does not say.
        """
        info = self._ask("memory", self._ask_memory)
        total_bytes, free_bytes = info.total - getattr(info, "reserved", 0), info.free
        if not 0 <= free_bytes <= total_bytes or not total_bytes:
            raise NvmlError(
                NvmlErrorKind.NONSENSE,
                f"the driver says that {free_bytes} of {total_bytes} bytes of {self._uuid} are free, which cannot be;"
                " update the driver, or nvidia-ml-py if that is older",
            )
        return total_bytes, free_bytes

    def read(self) -> MemoryReading:
        """Look once. Reserved is what the driver lists for this process, CUDA context and all; 0 if it lists nothing.

        It asks for the list of processes; where only the card's own numbers are wanted, `memory` is
        cheaper.

        Raises:
            NvmlError: the driver does not say.
        """
        total_bytes, free_bytes = self.memory()
        processes = self._processes(total_bytes, named=False) or ()
        own_bytes = sum(
            process.used_bytes or 0 for process in processes if process.pid == os.getpid()
        )
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
        """Return 0: the driver cannot take memory from a process; its allocator can give it."""
        return 0

    def processes(self) -> tuple[GpuProcess, ...] | None:
        """List the compute processes on the card.

        None where that cannot be known: no permission, not supported, or a list with impossible
        numbers. An empty list does not mean that nobody is there: drivers leave out processes
        outside of the container. Graphics processes are not asked for: that call holds the driver's
        lock for milliseconds, in which nobody's kernels are launched (MangoHud #2104).

        Raises:
            NvmlError: the driver cannot be asked at present, or the card is lost.
        """
        total_bytes, _free_bytes = self.memory()
        return self._processes(total_bytes, named=True)

    def close(self) -> None:
        """Let go of NVML, which counts its users.

        A closed device opens itself again when it is asked something.
        """
        if self._opened_in_pid == os.getpid():
            self._opened_in_pid = None
            with suppress(
                pynvml.NVMLError
            ):  # somebody has shut it down for us, so there is nothing to let go of
                pynvml.nvmlShutdown()

    def __getstate__(self) -> dict[str, Any]:
        """A copy opens the card for itself, when it is asked something."""
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
                # read with the wrong layout, so rows that look right cannot be trusted either
                return None
            if row.pid == 0:
                continue  # a process that has no number in this container
            # One process may come several times, each time with all its memory: the driver compares
            # numbers of different pid namespaces (open-gpu-kernel-modules, gpu_rmapi.c). So the
            # largest, not the sum.
            seen = used_bytes.get(row.pid)
            used_bytes[row.pid] = (
                row.usedGpuMemory if seen is None else max(seen, row.usedGpuMemory or 0)
            )
        return tuple(
            GpuProcess(pid, num_bytes, self._process_name(pid) if named else None)
            for pid, num_bytes in used_bytes.items()
        )

    def _process_name(self, pid: int) -> str | None:
        with suppress(
            psutil.Error
        ):  # it is gone, or not in this container: the driver may know it all the same
            return str(psutil.Process(pid).name())
        with suppress(
            pynvml.NVMLError, UnicodeDecodeError
        ):  # pynvml decodes strictly, and a name may be any bytes
            return pynvml.nvmlSystemGetProcessName(pid) or None
        return None

    def _ask_memory(self, handle: Any) -> Any:
        # Version 2 keeps apart what the driver has reserved for itself. Where it is missing,
        # version 1 (None) for good.
        if self._memory_version is not None:
            try:
                return pynvml.nvmlDeviceGetMemoryInfo(handle, version=self._memory_version)
            except (pynvml.NVMLError_FunctionNotFound, pynvml.NVMLError_NotSupported):
                self._memory_version = None
        return pynvml.nvmlDeviceGetMemoryInfo(handle)

    def _ask_processes(self, handle: Any) -> Any:
        # Version 2 has one layout in all drivers; version 3 had another from 535.43 to 535.86
        # (gpustat #161). pynvml's unversioned name is version 3, and where that is missing it
        # raises what is no NVMLError. The detail list of pynvml 13.615 raises TypeError where bytes
        # are N/A.
        with suppress(pynvml.NVMLError_FunctionNotFound):
            return pynvml.nvmlDeviceGetComputeRunningProcesses_v2(handle)
        return pynvml.nvmlDeviceGetComputeRunningProcesses_v3(handle)

    def _is_cut_into_slices(self) -> bool:
        try:
            current, _pending = self._ask("MIG mode", pynvml.nvmlDeviceGetMigMode)
        except NvmlError as error:
            if error.kind is not NvmlErrorKind.NOT_SUPPORTED:
                raise
            return False  # a card that knows no MIG
        return bool(current)

    def _connect(self) -> None:
        """Initialise NVML in this process and find the card in it."""
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            raise self._explained("presence", error) from error
        try:
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(self._uuid)
        except pynvml.NVMLError as error:
            pynvml.nvmlShutdown()
            if (
                error.value == pynvml.NVML_ERROR_INVALID_ARGUMENT
            ):  # what it says of a text that is no UUID at all
                error = pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
            raise self._explained("presence", error) from error
        self._opened_in_pid = os.getpid()

    def _ask(self, what: str, query: Callable[[Any], T]) -> T:
        """Put a question about the card; `what` it is about goes into the message if that fails."""
        if self._opened_in_pid != os.getpid():
            # in a forked child the parent's handle and initialisation are not to be relied on
            self._connect()
        try:
            with suppress(pynvml.NVMLError_Uninitialized):
                return query(self._handle)
            self._connect()  # somebody in this process has shut NVML down once too often
            return query(self._handle)
        except pynvml.NVMLError as error:
            raise self._explained(what, error) from error

    def _explained(self, what: str, error: Any) -> NvmlError:
        kind, text = NvmlErrorKind.TIMEOUT, _NO_ANSWER
        for code, known_kind, known_text in _EXPLANATIONS:
            if error.value == getattr(pynvml, f"NVML_ERROR_{code}", None):
                kind, text = known_kind, known_text
        bare_uuid = self._uuid.removeprefix("GPU-").removeprefix("MIG-")
        return NvmlError(
            kind, text.format(what=what, uuid=self._uuid, bare_uuid=bare_uuid, error=error)
        )


# Return codes that are not below may pass: timeout, in use, out of memory, unknown.
_NO_ANSWER = "the driver did not tell the {what} of {uuid} ({error}); ask again later, and read `dmesg` if it goes on"

_NOT_TOLD = "the driver does not tell the {what} of {uuid}: "

_EXPLANATIONS = (
    (
        "LIBRARY_NOT_FOUND",
        NvmlErrorKind.MISSING,
        "there is no NVIDIA driver library here, libnvidia-ml.so.1; install the driver, or give the container the cards"
        " (docker --gpus) and NVIDIA_DRIVER_CAPABILITIES=compute,utility",
    ),
    (
        "DRIVER_NOT_LOADED",
        NvmlErrorKind.DRIVER,
        "the NVIDIA kernel driver is not loaded; load it (modprobe nvidia), and read `dmesg` if that fails",
    ),
    (
        "LIB_RM_VERSION_MISMATCH",
        NvmlErrorKind.DRIVER,
        "the NVIDIA library and the loaded kernel driver are of two versions, as after an update; reboot the machine,"
        " or start the container anew if only that is older",
    ),
    (
        "NOT_SUPPORTED",
        NvmlErrorKind.NOT_SUPPORTED,
        _NOT_TOLD + "this card has no such answer; do without it",
    ),
    (
        "FUNCTION_NOT_FOUND",
        NvmlErrorKind.NOT_SUPPORTED,
        _NOT_TOLD + "it is too old for that; update it or do without",
    ),
    (
        "ARGUMENT_VERSION_MISMATCH",
        NvmlErrorKind.NOT_SUPPORTED,
        _NOT_TOLD + "it and nvidia-ml-py are of different times; update the older one",
    ),
    (
        "NO_PERMISSION",
        NvmlErrorKind.NO_PERMISSION,
        _NOT_TOLD + "this user may not know; ask as one who may open /dev/nvidia*",
    ),
    (
        "OPERATING_SYSTEM",
        NvmlErrorKind.NO_PERMISSION,
        _NOT_TOLD
        + "the operating system or the container forbids it; allow access to /dev/nvidia*",
    ),
    (
        "GPU_IS_LOST",
        NvmlErrorKind.LOST,
        "{uuid} has fallen off the bus, and what was in its memory is gone; look for Xid in `dmesg`, then reboot",
    ),
    (
        "RESET_REQUIRED",
        NvmlErrorKind.LOST,
        "{uuid} wants a reset; stop what runs on it, then `nvidia-smi --gpu-reset -i {uuid}` or reboot the machine",
    ),
    (
        "INVALID_ARGUMENT",
        NvmlErrorKind.LOST,
        "{uuid} is no longer the device that was opened, as when MIG slices are cut anew; start the run on one that is",
    ),
    (
        "NOT_FOUND",
        NvmlErrorKind.NOT_FOUND,
        "no card and no MIG slice here has the UUID {bare_uuid}; compare it, whole, with `nvidia-smi -L`, and see"
        " whether this container was given that card",
    ),
    (
        "GPU_NOT_FOUND",
        NvmlErrorKind.NOT_FOUND,
        "there is no NVIDIA card here; see whether this container was given one",
    ),
)
