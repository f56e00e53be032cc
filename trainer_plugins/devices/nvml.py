"""The driver's cards, the memory of each as NVML reports it, and the driver's errors."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import psutil
import pynvml  # importing it reads and starts nothing

from trainer_plugins.devices.base import GpuProcess
from trainer_plugins.reading import MemoryReading
from trainer_plugins.units import size

T = TypeVar("T")

_MAX_PID = 1 << 22  # no pid on 64-bit Linux is this high: PID_MAX_LIMIT in linux/threads.h


class NvmlError(RuntimeError):
    """The driver did not answer; the message explains why, and the remedy."""

    def __init__(self, message: str, code: int | None = None) -> None:
        super().__init__(message, code)
        self.code = code  # NVML's; None if it hangs, or its answer cannot be true

    def __str__(self) -> str:
        return str(self.args[0])

    @property
    def permanent(self) -> bool:
        return self.code is None or self.code in _EXPLANATIONS


def _explain(what: str, uuid: str, error: pynvml.NVMLError) -> NvmlError:
    """Translate pynvml's error into one with a remedy; `what` was asked of the card."""
    text = _EXPLANATIONS.get(error.value, _NO_ANSWER)
    bare_uuid = uuid.removeprefix("GPU-").removeprefix("MIG-")
    message = text.format(what=what, uuid=uuid, bare_uuid=bare_uuid, error=error)
    return NvmlError(message, error.value)


# Codes not listed below are temporary: timeout, in use, out of memory, unknown.
_NO_ANSWER = (
    "the driver did not report the {what} of {uuid} ({error}); ask again later, and read `dmesg` if"
    " it keeps failing"
)

_NOT_TOLD = "the driver does not report the {what} of {uuid}: "

_UNSUPPORTED = (
    pynvml.NVML_ERROR_NOT_SUPPORTED,
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
    pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
)
_FORBIDDEN = (pynvml.NVML_ERROR_NO_PERMISSION, pynvml.NVML_ERROR_OPERATING_SYSTEM)
NO_CARD = (
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND,
    pynvml.NVML_ERROR_NOT_FOUND,
    pynvml.NVML_ERROR_GPU_NOT_FOUND,
)

_EXPLANATIONS: Mapping[int, str] = {
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: "there is no NVIDIA driver library here,"
    " libnvidia-ml.so.1; install the driver, or give the container the cards (docker --gpus) and"
    " NVIDIA_DRIVER_CAPABILITIES=compute,utility",
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: "the NVIDIA kernel driver is not loaded; load it (modprobe"
    " nvidia), and read `dmesg` if that fails",
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: "the NVIDIA library and the loaded kernel driver"
    " have different versions, as after an update; reboot the machine, or restart the container if"
    " only that is older",
    **dict.fromkeys(
        _UNSUPPORTED,
        _NOT_TOLD + "{error}; update the older one of driver and nvidia-ml-py, or do without",
    ),
    **dict.fromkeys(
        _FORBIDDEN,
        _NOT_TOLD + "this user or container may not read it; allow access to /dev/nvidia*",
    ),
    pynvml.NVML_ERROR_GPU_IS_LOST: "{uuid} has fallen off the bus, and its memory is lost; look for"
    " Xid in `dmesg`, then reboot",
    pynvml.NVML_ERROR_RESET_REQUIRED: "{uuid} needs a reset; stop what runs on it, then `nvidia-smi"
    " --gpu-reset -i {uuid}` or reboot the machine",
    pynvml.NVML_ERROR_INVALID_ARGUMENT: "{uuid} is no longer the device that was opened, as after"
    " MIG slices were recreated; start the run on a device that exists",
    pynvml.NVML_ERROR_NOT_FOUND: "no card or MIG slice here has the UUID {bare_uuid}; compare the"
    " full UUID with `nvidia-smi -L`, and check whether this container was given that card",
    pynvml.NVML_ERROR_GPU_NOT_FOUND: "there is no NVIDIA card here; check whether this container"
    " was given one",
}  # by NVML's code, its meaning for the user


class NvmlDevice:
    """Reads one card, or one MIG slice, from its driver; a failure is an `NvmlError`."""

    # By UUID, never by index: NVML numbers cards by PCI address, CUDA by speed (pytorch #86539).

    def __init__(self, uuid: str, name: str | None = None) -> None:
        """Open the card with exactly this UUID; `open` also accepts torch's bare form."""
        self.uuid = uuid
        self.name = name or uuid
        self._handle: object = None
        self._opened_in_pid: int | None = None
        self._connect()

    @classmethod
    def open(cls, uuid: str, name: str | None = None) -> "NvmlDevice":
        """Open a card by its complete UUID: `GPU-…`, `MIG-…`, or bare as in torch."""
        # In a MIG slice torch's uuid is the slice's (cuDeviceGetUuid_v2). NVML rejects a prefix of
        # a UUID, which CUDA_VISIBLE_DEVICES may hold (vLLM #51677).
        if uuid.startswith(("GPU-", "MIG-")):
            return cls(uuid, name)
        try:
            card = cls(f"GPU-{uuid}", name)
        except NvmlError as error:
            if error.code != pynvml.NVML_ERROR_NOT_FOUND:
                raise
            return cls(f"MIG-{uuid}", name)
        if card._has_slices():
            raise NvmlError(
                f"GPU-{uuid} is divided into MIG slices, and it is unclear which one is meant; open"
                " the slice by its own UUID, MIG-…, from `nvidia-smi -L`",
                pynvml.NVML_ERROR_NOT_FOUND,
            )
        return card

    @property
    def is_mig(self) -> bool:
        """Return whether this is a MIG slice; its totals and processes are the slice's."""
        return self.uuid.startswith("MIG-")

    def memory(self) -> tuple[int, int]:
        """Return total and free bytes; takes about 12 us with a real driver (MangoHud #2104)."""
        # Version 1 counts the driver's own 300 to 600 MiB in the total, as used.
        ask = partial(pynvml.nvmlDeviceGetMemoryInfo, version=pynvml.nvmlMemory_v2)
        info = self._ask("memory", ask)
        total_bytes, free_bytes = info.total - info.reserved, info.free
        if not 0 <= free_bytes <= total_bytes or not total_bytes:
            raise NvmlError(
                f"the driver reports {free_bytes} of {total_bytes} bytes of {self.uuid} as free,"
                " which cannot be true; update the driver, or nvidia-ml-py if that is older",
            )
        return total_bytes, free_bytes

    def read(self) -> MemoryReading:
        """Take a reading as before a run: none of the used memory is this process's."""
        total_bytes, free_bytes = self.memory()
        return MemoryReading(
            device=self.name,
            total_bytes=total_bytes,
            free_bytes=free_bytes,
            reserved_bytes=0,
            allocated_bytes=0,
            peak_allocated_bytes=0,
        )

    def processes(self) -> tuple[GpuProcess, ...] | None:
        """List the compute processes on the card; None if not permitted, or impossible."""
        # Drivers omit processes outside the container. Asking for graphics processes would hold the
        # driver's lock for milliseconds (MangoHud #2104). Version 2 has one layout in all drivers;
        # 3, pynvml's unversioned one, had two (535.43 to 535.86, gpustat #161), and the detail list
        # of pynvml 13.615 raises TypeError for bytes that are N/A.
        total_bytes, _ = self.memory()
        try:
            rows = self._ask("processes", pynvml.nvmlDeviceGetComputeRunningProcesses_v2)
        except NvmlError as error:
            if error.code not in (*_UNSUPPORTED, *_FORBIDDEN):
                raise
            return None
        used_bytes: dict[int, int | None] = {}
        for row in rows:
            if row.pid >= _MAX_PID or (row.usedGpuMemory or 0) > total_bytes:
                # The rows were decoded with a wrong layout; even plausible ones may be wrong.
                return None
            if row.pid == 0:
                continue  # a process without a number in this container
            # The largest, not the sum: a process may be listed several times with all its memory,
            # because the driver compares pids of different namespaces (open-gpu-kernel-modules,
            # gpu_rmapi.c).
            listed = (used_bytes.get(row.pid), row.usedGpuMemory)  # None: not available
            used_bytes[row.pid] = max((each for each in listed if each is not None), default=None)
        return tuple(
            GpuProcess(pid, num_bytes, _process_name(pid)) for pid, num_bytes in used_bytes.items()
        )

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_handle": None, "_opened_in_pid": None}

    def _has_slices(self) -> bool:
        try:
            current, _pending = self._ask("MIG mode", pynvml.nvmlDeviceGetMigMode)
        except NvmlError as error:
            if error.code not in _UNSUPPORTED:
                raise
            return False  # a card without MIG
        return bool(current)

    def _connect(self) -> None:
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            raise _explain("presence", self.uuid, error) from error
        try:
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(self.uuid)
        except pynvml.NVMLError as error:
            pynvml.nvmlShutdown()
            # NVML's answer to a text that is not a UUID at all.
            if error.value == pynvml.NVML_ERROR_INVALID_ARGUMENT:
                error = pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
            raise _explain("presence", self.uuid, error) from error
        self._opened_in_pid = os.getpid()

    def _ask(self, what: str, query: Callable[[object], T]) -> T:
        if self._opened_in_pid != os.getpid():
            # A forked child cannot rely on its parent's handle and initialisation.
            self._connect()
        try:
            with suppress(pynvml.NVMLError_Uninitialized):
                return query(self._handle)
            self._connect()  # other code in this process has shut NVML down once too often
            return query(self._handle)
        except pynvml.NVMLError as error:
            raise _explain(what, self.uuid, error) from error


def _process_name(pid: int) -> str | None:
    with suppress(psutil.Error):  # it ended or is outside the container; the driver may know it
        return str(psutil.Process(pid).name())
    # pynvml decodes strictly, and a name may be any bytes.
    with suppress(pynvml.NVMLError, UnicodeDecodeError):
        return pynvml.nvmlSystemGetProcessName(pid) or None
    return None


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


def cards_in_words() -> Iterator[str]:
    """Yield the name, size and slices of each card, without identifying it."""
    for card in list_cards():
        if card.trouble:
            yield "a card for which the driver does not answer"
            continue
        line = card.name or "a card without a name"
        with suppress(NvmlError):
            line += f", {size(NvmlDevice(card.uuid).memory()[0])}"
        yield line + (f", {len(card.slices)} MIG slices" if card.slices else "")


@contextmanager
def _nvml(what: str, uuid: str) -> Iterator[None]:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise _explain("presence", uuid, error) from error
    try:
        yield
    except pynvml.NVMLError as error:
        raise _explain(what, uuid, error) from error
    finally:
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def _card(index: int) -> InstalledCard:
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        uuid = pynvml.nvmlDeviceGetUUID(handle)
    except pynvml.NVMLError as error:
        trouble = str(_explain("name", f"card {index}", error))
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
