"""Main memory is the machine's or the tightest control group's, told from real files."""

import mmap
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from trainer_plugins.devices import HostDevice
from trainer_plugins.units import GIB, MIB


def cgroup_v2(root: Path, groups: dict[str, tuple[str, int, int]]) -> HostDevice:
    """A tree of groups: path -> (memory.max, current, inactive_file); the process lives in the longest path."""
    proc, cgroups = root / "proc", root / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text(f"0::/{max(groups, key=len)}\n")
    for path, (limit, current, inactive) in groups.items():
        folder = cgroups / path
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text(f"{current}\n")
        (folder / "memory.stat").write_text(
            f"anon {current - inactive}\ninactive_file {inactive}\n"
        )
        (folder / "memory.events").write_text(f"low 0\noom 3\noom_kill {9 - 2 * path.count('/')}\n")
    return HostDevice(proc, cgroups)


def cgroup_v1(root: Path, limit: int, usage: int) -> HostDevice:
    proc, cgroups = root / "proc", root / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text("4:memory:/docker/abc\n0::/elsewhere\n")
    for folder, bytes_ in ((cgroups / "memory", 1 << 63), (cgroups / "memory/docker/abc", limit)):
        folder.mkdir(parents=True)
        (folder / "memory.limit_in_bytes").write_text(f"{bytes_ - bytes_ % 4096}\n")
        (folder / "memory.usage_in_bytes").write_text(f"{usage}\n")
        (folder / "memory.stat").write_text("total_inactive_file 0\n")
        (folder / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 1\n")
    return HostDevice(proc, cgroups)


def test_the_tightest_group_around_the_process_counts(tmp_path: Path) -> None:
    host = cgroup_v2(
        tmp_path,
        {
            "kube": ("max", GIB, 0),
            "kube/pod": (str(2 * GIB), 3 * GIB // 2, 256 * MIB),
            "kube/pod/container": (str(4 * GIB), GIB, 0),
        },
    )

    reading = host.read()

    assert reading.total_bytes == 2 * GIB
    assert (
        reading.free_bytes == 768 * MIB
    )  # 2 GiB less a working set of 1.5 GiB less 256 MiB that can be dropped
    assert (
        host.facts().num_oom_kills == 5
    )  # of the innermost group; those around it count their neighbours' too


def test_version_1_counts_too(tmp_path: Path) -> None:
    host = cgroup_v1(tmp_path, limit=GIB, usage=3 * GIB // 4)

    assert host.read().total_bytes == GIB
    assert host.read().free_bytes == 256 * MIB
    assert host.facts().num_oom_kills == 1


def test_a_container_that_sees_only_its_own_group(tmp_path: Path) -> None:
    host = cgroup_v2(tmp_path, {"": ("max", 0, 0)})
    (tmp_path / "proc" / "self" / "cgroup").write_text("0::/as/the/host/calls/it\n")
    (tmp_path / "cgroup" / "memory.max").write_text(str(GIB))

    assert HostDevice(tmp_path / "proc", tmp_path / "cgroup").read().total_bytes == GIB
    assert host.facts().shm_total_bytes >= host.facts().shm_free_bytes


@pytest.mark.parametrize("files", ["none", "no limit"])
def test_without_a_limit_it_is_the_machine(tmp_path: Path, files: str) -> None:
    host = (
        HostDevice(tmp_path, tmp_path)
        if files == "none"
        else cgroup_v2(tmp_path, {"group": ("max", GIB, 0)})
    )

    assert host.read().total_bytes == psutil.virtual_memory().total


def test_the_peak_is_what_happened_between_two_looks() -> None:
    host = HostDevice()
    host.reset_peak()
    before = host.read()
    with mmap.mmap(-1, 64 * MIB) as block:  # not from the heap, which may have kept as much
        block[:: mmap.PAGESIZE] = b"x" * (64 * MIB // mmap.PAGESIZE)

    assert host.read().peak_allocated_bytes - before.allocated_bytes > 48 * MIB
    host.reset_peak()
    assert host.read().peak_allocated_bytes - before.allocated_bytes < 48 * MIB


def test_the_peak_is_not_the_launchers() -> None:
    """A process keeps the high-water mark of the one that started it; the Trainer is started by a launcher."""
    child = "from trainer_plugins.devices import HostDevice; d = HostDevice(); d.reset_peak(); print(d.read())"
    code = (
        f"import subprocess, sys; b = bytearray(b'x') * (900 << 20); "
        f"print(subprocess.run([sys.executable, '-c', {child!r}], check=True, capture_output=True, text=True).stdout)"
    )
    said = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout

    peak = re.search(r"peak_allocated_bytes=(\d+)", said)
    assert peak is not None
    assert int(peak[1]) < 700 * MIB
