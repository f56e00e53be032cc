"""Start a command behind a wall: it can read your files, change none, and reach no other host.

    python -I -S namespaces.py '{"scratch": "DIR", "real": [], "network": false}' python train.py

The command gets its own mount, network and host name namespaces (`man 7 namespaces`). An overlay
covers each writable folder: reads fall through to your files, while writes, renames and deletions
are visible only to this command and its children. System folders are read-only; the folders in
`real`, and scratch, are really written. Its network has only the loopback device, which answers for
all addresses.

This file is a separate program and needs nothing but Python; `wall.py` starts it.
"""

import contextlib
import ctypes
import hashlib
import json
import os
import socket
import struct
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

_FROM_MOUNT_H = {"ro": 1, "nosuid": 2, "nodev": 4, "noexec": 8, "noatime": 1024, "nodiratime": 2048}
_RDONLY, _REMOUNT, _BIND, _REC, _PRIVATE, _RELATIME = 1, 32, 4096, 16384, 1 << 18, 1 << 21
_NEWNS, _NEWUTS, _NEWUSER, _NEWNET = 0x00020000, 0x04000000, 0x10000000, 0x40000000

_AS_THEY_ARE = ("/proc", "/sys", "/dev")
_READ_ONLY = (
    "/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc", "/boot", "/nix",
)  # fmt: skip


def build_wall(scratch: Path, real: Iterable[Path], *, has_network: bool) -> None:
    """Put this process behind the wall.

    Args:
        scratch: a folder that is really written, and receives all other writes of the command.
        real: other folders and files that are really written.
        has_network: leave the network as it is.

    Raises:
        OSError: the kernel, or the container that this runs in, does not allow it.
    """
    has_privileges = _enter_namespaces(0 if has_network else _NEWNET | _NEWUTS)
    if not has_network:
        socket.sethostname("localhost")  # a launcher looks itself up by this name
        _answer_for_all_addresses()
    _mount(None, "/", None, _REC | _PRIVATE)
    mounts = dict(_mounts())
    passages = [(str(path), _passage(str(path))) for path in (scratch, *real)]
    for place, flags in mounts.items():
        if not _is_below(place, _AS_THEY_ARE):
            with contextlib.suppress(OSError):  # hidden below a later one, or a broken share
                _mount(None, place, None, _REMOUNT | _BIND | _RDONLY | flags)
    layers = f"/proc/self/fd/{passages[0][1]}/layers"
    os.makedirs(f"{layers}/in-memory", exist_ok=True)
    _mount("tmpfs", f"{layers}/in-memory", "tmpfs", 0)
    # An overlay's way to record renamed folders, or the one allowed to an ordinary user.
    notes = "redirect_dir=on" if has_privileges else "userxattr"
    covered = [_cover(place, layers, notes) for place in _places_to_cover(mounts)]
    if not any(covered):
        raise OSError("no overlay can be mounted")
    for place, descriptor in passages:
        _mount(f"/proc/self/fd/{descriptor}", place, None, _BIND)
        os.close(descriptor)
    os.chdir(os.getcwd())  # enter the overlay


def _enter_namespaces(others: int) -> bool:
    """Enter namespaces; return whether this process already had the privileges outside them."""
    uid, gid = os.getuid(), os.getgid()
    try:
        _call("unshare", _NEWNS | others)
    except OSError:
        _call("unshare", _NEWUSER | _NEWNS | others)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
        return False
    return True


def _mounts() -> Iterator[tuple[str, int]]:
    """Yield each mount point, and the flags that a remount has to keep."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields = line.split()
        options = fields[5].split(",")
        flags = sum(_FROM_MOUNT_H.get(option, 0) for option in options)
        place = fields[4].encode().decode("unicode_escape").encode("latin-1").decode()
        yield place, flags | (_RELATIME if "relatime" in options else 0)


def _passage(place: str) -> int:
    """Return a descriptor of a mount of this place that stays writable."""
    _mount(place, place, None, _BIND | _REC)
    return os.open(place, os.O_PATH)


def _places_to_cover(mounts: Iterable[str]) -> list[str]:
    """Return the folders without mounts below them, starting at the root, and the user's own."""
    found = list(_folders_below("/", mounts))
    for own in (os.getcwd(), os.environ.get("HOME"), os.environ.get("TMPDIR"), "/tmp"):
        if own and os.path.isdir(own) and not _is_below(os.path.realpath(own), found):
            found.append(os.path.realpath(own))  # in a folder that cannot be listed, or in /usr
    return found


def _folders_below(folder: str, mounts: Iterable[str]) -> Iterator[str]:
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if not entry.is_dir(follow_symlinks=False) or _is_below(
                entry.path, (*_AS_THEY_ARE, *_READ_ONLY)
            ):
                continue
            if any(mount.startswith(f"{entry.path}/") for mount in mounts):
                yield from _folders_below(entry.path, mounts)
            else:
                yield entry.path


def _cover(place: str, layers: str, notes: str) -> bool:
    """Mount an overlay over a folder; return whether it worked: otherwise the folder is read-only.

    An upper layer cannot be inside the lower one, or on an overlay: it is then in memory.
    """
    name = hashlib.sha256(place.encode()).hexdigest()[:16]
    try:
        lower = os.open(place, os.O_PATH)
    except FileNotFoundError:  # another program's, which has ended since
        return False
    try:
        for layer in (f"{layers}/{name}", f"{layers}/in-memory/{name}"):
            os.makedirs(f"{layer}/upper", exist_ok=True)
            os.makedirs(f"{layer}/work", exist_ok=True)
            os.chmod(f"{layer}/upper", os.fstat(lower).st_mode & 0o7777)
            options = f"lowerdir=/proc/self/fd/{lower},upperdir={layer}/upper,workdir={layer}/work"
            with contextlib.suppress(OSError):
                _mount("overlay", place, "overlay", 0, f"{options},{notes}")
                return True
    finally:
        os.close(lower)
    return False


def _answer_for_all_addresses() -> None:
    """Bring up the loopback device, and route every IPv4 address to it.

    A rank then finds a rendezvous at its host's address, and other hosts refuse at once.
    """
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as ask:
        name = b"lo".ljust(16, b"\0")
        flags = struct.unpack("16sh", fcntl.ioctl(ask, 0x8913, name + b"\0" * 16)[:18])[1]
        fcntl.ioctl(ask, 0x8914, name + struct.pack("h", flags | 1) + b"\0" * 14)  # IFF_UP
    # `ip route add local default dev lo`: linux/rtnetlink.h, RTM_NEWROUTE to the local table (255)
    route = struct.pack("=BBBBBBBBI", socket.AF_INET, 0, 0, 0, 255, 3, 254, 2, 0)
    route += struct.pack("=HHI", 8, 4, socket.if_nametoindex("lo"))  # RTA_OIF
    header = struct.pack("=IHHII", 16 + len(route), 24, 0x1 | 0x4 | 0x400 | 0x200, 1, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as kernel:
        kernel.send(header + route)
        (error,) = struct.unpack_from("=i", kernel.recv(4096), 16)
        if error:
            raise OSError(-error, os.strerror(-error))


def _is_below(place: str, folders: Iterable[str]) -> bool:
    return any(place == folder or place.startswith(f"{folder}/") for folder in folders)


def _mount(
    source: str | None, target: str, kind: str | None, flags: int, options: str | None = None
) -> None:
    words = [None if word is None else os.fsencode(word) for word in (source, target, kind)]
    _call("mount", *words, ctypes.c_ulong(flags), None if options is None else options.encode())


def _call(name: str, *arguments: object) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    try:
        build_wall(Path(asked["scratch"]), map(Path, asked["real"]), has_network=asked["network"])
    except OSError as problem:
        sys.exit(f"no wall: {problem}")
    try:
        os.execvp(sys.argv[2], sys.argv[2:])
    except OSError as problem:
        sys.stderr.write(f"cannot run {sys.argv[2]}: {problem.strerror}\n")
        sys.exit(127)  # as a shell does
