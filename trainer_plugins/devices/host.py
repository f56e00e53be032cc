"""HostDevice: main memory as a device, and the numbers that the kernel's OOM killer uses."""

import gc
import multiprocessing
import os
import shutil
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import NamedTuple

import psutil

from trainer_plugins.devices.base import GpuProcess
from trainer_plugins.reading import MemoryReading
from trainer_plugins.units import KIB

_WORKER = "pt_data_worker"  # torch/utils/data/_utils/worker.py
ROOM_EVERY_SECONDS = 1.0  # most of the cost of a reading: four files per limit
_NO_LIMIT = 1 << 60  # cgroup v1 writes the largest multiple of a page below 2**63


class HostFacts(NamedTuple):
    """Other limits on the host that can end a run; sizes in bytes."""

    num_oom_kills: int  # processes of this container killed for memory; 0 if no cgroup counts them
    shm_total_bytes: int  # /dev/shm, through which dataloader workers pass batches; 0 without one
    shm_free_bytes: int


class HostDevice:
    """Reads main memory as the kernel's OOM killer counts it for this process."""

    # Sources: docs.kernel.org/admin-guide/cgroup-v2.html (memory.max, memory.stat, memory.events),
    # docs.kernel.org/admin-guide/cgroup-v1/memory.html, proc_pid_clear_refs(5).

    name = "cpu"

    def __init__(self, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> None:
        self._process: psutil.Process | None = None
        self._limits = _limits_around(proc, cgroups)
        self._peak_bytes = 0
        self._kernel_peak = True  # we may reset the kernel's peak; else readings count
        self._room = (0, 0)  # total and free, if this process held nothing
        self._ask_for_room_at = 0.0

    def read(self) -> MemoryReading:
        """Read this process's memory, and at most once a second that of all others."""
        resident_bytes = self.resident_bytes()
        if monotonic() >= self._ask_for_room_at:
            self._ask_for_room_at = monotonic() + ROOM_EVERY_SECONDS
            total_bytes, free_bytes = self._total_and_free()
            self._room = (total_bytes, free_bytes + resident_bytes)
        total_bytes = self._room[0]
        free_bytes = min(total_bytes, max(0, self._room[1] - resident_bytes))
        if self._kernel_peak:
            # getrusage does not help: its maximum includes the parent's from before exec.
            with open("/proc/self/status") as lines:
                peaks = (int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
                self._peak_bytes = next(peaks, 0) * KIB
        self._peak_bytes = max(self._peak_bytes, resident_bytes)
        return MemoryReading(
            device=self.name,
            total_bytes=total_bytes,
            free_bytes=free_bytes,
            reserved_bytes=resident_bytes,
            allocated_bytes=resident_bytes,
            peak_allocated_bytes=self._peak_bytes,
        )

    def _total_and_free(self) -> tuple[int, int]:
        machine = psutil.virtual_memory()
        total_bytes, free_bytes = machine.total, machine.available
        for limit in self._limits:
            limit_bytes = limit.limit_bytes()
            if limit_bytes is not None:
                total_bytes = min(total_bytes, limit_bytes)
                free_bytes = min(free_bytes, max(0, limit_bytes - limit.working_set_bytes()))
        return total_bytes, free_bytes

    def reset_peak(self) -> None:
        self._peak_bytes = 0
        try:
            with open("/proc/self/clear_refs", "w") as file:
                file.write("5")
        except OSError:
            self._kernel_peak = False

    def release_cached(self) -> int:
        before = self.resident_bytes()
        gc.collect()
        return max(0, before - self.resident_bytes())

    def processes(self) -> tuple[GpuProcess, ...] | None:
        return None

    def resident_bytes(self) -> int:
        """Return the resident bytes of this process, in about 10 microseconds."""
        if self._process is None or self._process.pid != os.getpid():  # a copy, or a forked child
            self._process = psutil.Process()
        return int(self._process.memory_info().rss)

    def worker_bytes(self) -> tuple[int, ...]:
        """Return the unshared memory of each dataloader worker; takes milliseconds per GB."""
        # A forked worker's resident bytes would include the memory it shares with us.
        found = []
        for child in multiprocessing.active_children():
            with suppress(psutil.Error):  # it may end meanwhile
                process = psutil.Process(child.pid)
                if process.name().startswith(_WORKER):
                    found.append(int(process.memory_full_info().uss))
        return tuple(found)

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_process": None}

    def facts(self) -> HostFacts:
        """Read the kernel's kill count and shared memory, in about 0.1 ms."""
        try:
            shm_total_bytes, _, shm_free_bytes = shutil.disk_usage("/dev/shm")
        except OSError:
            shm_total_bytes = shm_free_bytes = 0
        # The innermost group: outer groups also count the kills of all groups inside them.
        num_oom_kills = self._limits[0].num_oom_kills() if self._limits else 0
        return HostFacts(num_oom_kills, shm_total_bytes, shm_free_bytes)


# For each version of control groups, the other fields of `_Limit`.
_V1 = "memory.limit_in_bytes", "memory.usage_in_bytes", "memory.oom_control", "total_inactive_file"
_V2 = "memory.max", "memory.current", "memory.events", "inactive_file"


class _Limit(NamedTuple):
    folder: Path
    limit: str  # this and the next two: files in the folder
    current: str
    events: str
    inactive: str  # key in memory.stat

    def limit_bytes(self) -> int | None:
        text = _text(self.folder / self.limit)
        if not text or text == "max" or int(text) >= _NO_LIMIT:
            return None
        return int(text)

    def working_set_bytes(self) -> int:
        """Return the memory that counts towards the limit and cannot be dropped, like kubelet."""
        text = _text(self.folder / self.current)
        if not text:
            return 0
        return max(0, int(text) - _table(self.folder / "memory.stat").get(self.inactive, 0))

    def num_oom_kills(self) -> int:
        return _table(self.folder / self.events).get("oom_kill", 0)


def _limits_around(proc: Path, cgroups: Path) -> tuple[_Limit, ...]:
    """Return this process's control groups that count memory, innermost first."""
    lines = [line.split(":", 2) for line in _text(proc / "self" / "cgroup").splitlines()]
    v1 = next((path for _, kinds, path in lines if "memory" in kinds.split(",")), None)
    v2 = next((path for number, kinds, path in lines if number == "0" and not kinds), None)
    if v1 is not None and (cgroups / "memory").is_dir():
        root, path, names = cgroups / "memory", v1, _V1
    elif v2 is not None:
        root, path, names = cgroups, v2, _V2
    else:
        return ()
    folder = root / path.lstrip("/")
    if not folder.is_dir():
        # In a container the path may be the host's, although our own group is mounted.
        folder = root
    inward_out = [folder, *folder.parents]
    around = inward_out[: inward_out.index(root) + 1]
    return tuple(_Limit(folder, *names) for folder in around if (folder / "memory.stat").is_file())


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _table(path: Path) -> dict[str, int]:
    pairs = (line.split()[:2] for line in _text(path).splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}
