"""Find interrupted builds of torch's C++ extensions, which block later launches; finish them.

`torch.utils.cpp_extension.load` creates a file named `lock`, and other processes wait until it is
gone. A process killed while it compiles leaves it behind; during a build, its process has it open.
"""

import functools
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from trainer_plugins.finding import Finding
from trainer_plugins.launch.lint.document import ConfigError, Document
from trainer_plugins.patched import Patches
from trainer_plugins.printable import printable

# Other machines share these file systems, and their processes are invisible here.
_SHARED = re.compile("nfs|cifs|smb|lustre|beegfs|gpfs|ceph|gluster|fuse|9p|virtiofs")


_DEEPSPEED = {
    "cpu_adam": "optimizer in main memory",
    "deepspeed_shm_comm": "collectives on the CPU",
    "fused_adam": "optimizer on the card",
    "async_io": "access to a drive",
}
# Measured with DeepSpeed 0.19 and g++ 12: 54 s, 170 s; on busy machines 80 s and 583 s.
_DURATION = "one to three minutes on two quiet cores, up to ten on busy ones"
_FIRST_PID_NAMESPACE = 0xEFFFFFFC  # PROC_PID_INIT_INO, include/linux/proc_ns.h


class ExtensionLock(NamedTuple):
    """Describes the lock file of a build, and its owner."""

    path: Path
    age_seconds: float
    holder: int | None = None  # the process that has it open, which is building the extension
    unseen: str = ""  # why its holder may be invisible; empty if all processes are visible


def read_locks(environ: Mapping[str, str]) -> tuple[ExtensionLock, ...]:
    """Find the locks in the folder where this Python builds torch extensions."""
    files = sorted(_extension_files("*/lock", environ))
    if not files or not _existence_locks():
        return ()
    return tuple(lock for lock in map(_read_lock, files) if lock is not None)


def find_needed(offload: Mapping[str, str], optimizer: object = None) -> tuple[str, ...]:
    """Return the extensions that DeepSpeed loads for a launch's offload and optimizer.

    >>> find_needed({"optimizer": "cpu", "param": "nvme"})
    ('cpu_adam', 'async_io')
    >>> find_needed({}, "AdamW"), find_needed({})
    (('fused_adam',), ())
    """
    is_adam = "adam" in str(optimizer or "adam").lower()
    on_card = optimizer is not None and "optimizer" not in offload
    wanted = {
        "cpu_adam": is_adam and "optimizer" in offload,
        "fused_adam": is_adam and on_card,
        "async_io": "nvme" in offload.values(),
    }
    return tuple(name for name, is_needed in wanted.items() if is_needed)


def find_needed_by(document: Document) -> tuple[str, ...]:
    """Return the extensions that DeepSpeed loads for a launch file."""
    if document.zero_stage is None:
        return ()
    return find_needed(document.offload_devices, document.get_deepspeed("optimizer.type"))


def lock_findings(
    locks: Iterable[ExtensionLock], will_need: Sequence[str] = ()
) -> Iterator[Finding]:
    """Report the locks that no visible process holds; a running build removes its own."""
    for lock in locks:
        name, old = lock.path.parent.name, f"{lock.path} is {_age(lock.age_seconds)} old"
        if lock.holder is None and lock.unseen:
            yield Finding.warning(
                code="extension-lock",
                summary=f"the extension {name} of torch is locked, and it is unknown whether a"
                " process is building it now",
                evidence=f"{old}; {lock.unseen}",
                remedy="If no process that shares this folder is building it (check there:"
                f" fuser -v {lock.path}), remove the file",
                amount=lock.age_seconds,
            )
        elif lock.holder is None:
            report = Finding.error if name in will_need else Finding.warning
            yield report(
                code="extension-lock",
                summary=f"every launch that needs the torch extension {name} waits forever: a build"
                " was interrupted",
                evidence=f"{old}, and no process holds it",
                remedy=_way_out(name, lock.path),
                amount=lock.age_seconds,
            )


def _way_out(name: str, path: Path) -> str:
    if name not in _DEEPSPEED:
        return f"Before a launch: rm {path}. Without it, waiting ranks fail with an ImportError"
    builds = f"trainer-plugins configs build {name}"
    return f"Run {builds}, also while ranks wait: after rm {path} they fail with an ImportError"


@functools.cache
def announce_builds() -> None:
    """Make torch report on stderr that it compiles an extension, or waits for another process."""
    from torch.utils import cpp_extension

    def load_announced(load: Callable[..., Any], name: str, *args: Any, **kwargs: Any) -> Any:
        if said := _describe_wait(name):
            sys.stderr.write(f"trainer_plugins: {printable(said)}\n")
        return load(name, *args, **kwargs)

    Patches().wrap(cpp_extension, "load", load_announced)  # DeepSpeed looks it up at each use


def _describe_wait(name: str) -> str:
    """Describe the wait of a process that loads an extension now; empty if there is none."""
    lock = next((each for each in read_locks(os.environ) if each.path.parent.name == name), None)
    if lock is not None and lock.holder is not None:
        return f"process {lock.holder} compiles {name}, and this one waits for it"
    if lock is not None:
        will_end = "although no process is compiling it" if lock.unseen else "forever"
        return f"{name} waits {will_end} for {lock.path}. {_way_out(name, lock.path)}"
    # An extension compiled from another version of its source counts too.
    if any(_extension_files(f"{name}/{name}.so", os.environ)):
        return ""
    purpose = f" (DeepSpeed's {_DEEPSPEED[name]})" if name in _DEEPSPEED else ""
    return (
        f"torch compiles {name} first{purpose}: usually {_DURATION}, without output, and once"
        " for this Python"
    )


def build_extension(name: str) -> float:
    """Build an extension as a rank would, and return the seconds; waiting ranks then go on.

    The lock of an interrupted build stays until the extension exists: ranks that wait load it when
    the lock is gone, and fail if there is nothing to load.
    """
    try:
        from deepspeed.ops.op_builder.all_ops import ALL_OPS
    except ImportError as error:
        raise ConfigError(f"DeepSpeed cannot be imported: {error}") from None
    if name not in ALL_OPS:
        raise ConfigError(f"DeepSpeed has no extension {name}: it has {', '.join(sorted(ALL_OPS))}")
    for lock in read_locks(os.environ):
        if lock.path.parent.name == name and lock.unseen and lock.holder is None:
            raise ConfigError(str(next(lock_findings([lock]))))
    begun = time.monotonic()
    with Patches() as patches:
        _inherit_locks(patches)
        try:
            ALL_OPS[name].load(verbose=False)
        except (RuntimeError, ImportError) as error:
            lines = str(error).splitlines()
            wrong = next((line for line in lines if " error: " in line), lines[0])
            raise RuntimeError(f"{name} cannot be built: {wrong}. See `ds_report`") from error
    return time.monotonic() - begun


def _inherit_locks(patches: Patches) -> None:
    """Take over a lock that no process holds."""
    from torch.utils import cpp_extension

    def try_acquire(original: Callable[[Any], bool], baton: Any) -> bool:
        left = (each.path for each in read_locks(os.environ) if each.holder is None)
        if not original(baton) and any(path.samefile(baton.lock_file_path) for path in left):
            baton.fd = os.open(baton.lock_file_path, os.O_RDONLY)
        return baton.fd is not None

    if hasattr(cpp_extension, "FileBaton"):  # with a later torch, no lock outlives its process
        patches.wrap(cpp_extension.FileBaton, "try_acquire", try_acquire)


def _extension_files(pattern: str, environ: Mapping[str, str]) -> Iterator[Path]:
    """Yield files below torch.utils.cpp_extension._get_build_directory, of any accelerator."""
    if (chosen := environ.get("TORCH_EXTENSIONS_DIR")) is not None:
        yield from Path(chosen).glob(pattern)
        return
    cache = Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    python = f"py{sys.version_info.major}{sys.version_info.minor}{getattr(sys, 'abiflags', '')}"
    yield from (cache / "torch_extensions").glob(f"{python}_*/{pattern}")


def _existence_locks() -> bool:
    """Return whether this torch uses a file as a lock; later ones lock it (pytorch#190543)."""
    torch: Any = find_spec("torch")
    return "FileBaton(" in (Path(torch.origin).parent / "utils" / "cpp_extension.py").read_text()


def _read_lock(file: Path) -> ExtensionLock | None:
    try:
        found = file.stat()
        holder, unseen = _holder(file, found)
        file.stat()  # a build that ended meanwhile closed the file, then removed it
    except OSError:
        return None
    age_seconds = max(0.0, time.time() - found.st_mtime)
    return ExtensionLock(path=file, age_seconds=age_seconds, holder=holder, unseen=unseen)


def _holder(file: Path, found: os.stat_result) -> tuple[int | None, str]:
    """Return the process that has a file open, or why it may be invisible."""
    unseen = _explain_unseen(file)
    for process in psutil.process_iter(["uids", "status"]):
        try:
            opened = list(Path(f"/proc/{process.pid}/fd").iterdir())
        except PermissionError:
            if _may_hold(process, found.st_uid):
                unseen = unseen or f"the open files of process {process.pid} are not readable"
            continue
        except OSError:
            continue  # it has ended
        if any(_same_file(one, file, found) for one in opened):
            return process.pid, ""
    return None, unseen


def _may_hold(process: psutil.Process, owner: int) -> bool:
    """Return whether a process with unreadable open files may have created this user's file."""
    is_first = process.pid == 1 and _sees_all_processes()
    if is_first or process.info["status"] == psutil.STATUS_ZOMBIE:
        return False
    return process.info["uids"] is None or owner in process.info["uids"]


def _same_file(opened: Path, file: Path, found: os.stat_result) -> bool:
    """Return whether a link below /proc leads to this file; comparing names saves stat calls."""
    try:
        return os.readlink(opened).endswith(file.name) and os.path.samestat(opened.stat(), found)
    except OSError:
        return False  # it was closed


def _explain_unseen(file: Path) -> str:
    """Return why processes that may use a folder are invisible here; empty if they are visible."""
    if not Path("/proc/self/fd").is_dir():
        return "this system does not list the open files of its processes"
    kinds = {part.mountpoint: part.fstype for part in psutil.disk_partitions(all=True)}
    mounted = (kinds[str(folder)] for folder in file.resolve().parents if str(folder) in kinds)
    kind = next(mounted, "")
    if _SHARED.match(kind):
        return f"its folder is on {kind}, which other machines may share"
    if kind != "overlay" and not _sees_all_processes():
        return "this container only sees its own processes"
    return ""


def _sees_all_processes() -> bool:
    """Return whether process 1 is the system's first: then this container has no pid namespace."""
    return Path("/proc/self/ns/pid").stat().st_ino == _FIRST_PID_NAMESPACE


def _age(seconds: float) -> str:
    for unit, length in (("days", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
