"""SimCard: the file through which processes share a simulated card.

`simgpu` records there how much each process reserves, the scripted driver library answers from it,
and a test writes foreign processes into it. It is little endian and has 4096 bytes: a header
(magic, capacity, uuid), then 60 slots, one per process. `card_file.h` has the same layout in C++.
"""

import mmap
import os
import struct
import uuid as uuids
from pathlib import Path
from typing import NamedTuple

import psutil

_MAGIC = b"SIMCARD1"
_HEADER = struct.Struct("<8sQ48s")
_SLOT = struct.Struct("<iIQ48s")
_NUM_SLOTS = 60
_FILE_BYTES = 4096
_LIVE = 1  # a flag: the slot counts only while its process exists; others always count


class CardProcess(NamedTuple):
    """Describes the memory of one process on the card."""

    pid: int
    num_bytes: int
    name: str


class SimCard:
    """Reads and writes one simulated card through its file.

    Args:
        path: a file that `SimCard.create` has written.

    Raises:
        ValueError: the file is not a card file.
        OSError: the file cannot be opened.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        with self.path.open("r+b") as file:
            if os.fstat(file.fileno()).st_size < _FILE_BYTES or file.read(len(_MAGIC)) != _MAGIC:
                raise ValueError(f"not a card file: {self.path}")
            self._memory = mmap.mmap(file.fileno(), _FILE_BYTES)
        # Eight aligned bytes are written at once: no other process ever reads half a size.
        self._words = memoryview(self._memory).cast("Q")

    @classmethod
    def create(
        cls, path: str | os.PathLike[str], capacity_bytes: int, uuid: str | None = None
    ) -> "SimCard":
        """Write a new card file, or reset an existing one.

        Args:
            path: where to write it.
            capacity_bytes: the memory of the card.
            uuid: the driver's name for it, `GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx`; None for a
                random one.

        Raises:
            ValueError: the capacity is not positive, or the uuid is not of this form.
        """
        uuid = uuid if uuid is not None else f"GPU-{uuids.uuid4()}"
        if not uuid.startswith("GPU-") or len(uuid) != len("GPU-") + 36:
            raise ValueError(f"a card's uuid is GPU- and 36 characters, got {uuid!r}")
        if capacity_bytes <= 0:
            raise ValueError(f"a card needs a positive capacity, got {capacity_bytes}")
        content = _HEADER.pack(_MAGIC, capacity_bytes, uuid.encode()).ljust(_FILE_BYTES, b"\0")
        # Renamed when complete: a process that opens the path meanwhile sees a whole card or none.
        draft = Path(f"{os.fspath(path)}.{os.getpid()}")
        draft.write_bytes(content)
        draft.replace(path)
        return cls(path)

    @property
    def capacity_bytes(self) -> int:
        """Return the memory of the card; you can set it, even below the memory in use."""
        return self._words[1]  # after the magic

    @capacity_bytes.setter
    def capacity_bytes(self, value: int) -> None:
        if value <= 0:
            raise ValueError(f"a card needs a positive capacity, got {value}")
        self._words[1] = value

    @property
    def uuid(self) -> str:
        """Return the driver's name for the card, `GPU-...`."""
        text: bytes = _HEADER.unpack_from(self._memory, 0)[2]
        return text.rstrip(b"\0").decode()

    @property
    def used_bytes(self) -> int:
        """Return the memory of all processes together."""
        return sum(process.num_bytes for process in self.processes())

    @property
    def free_bytes(self) -> int:
        """Return the free memory, never below 0."""
        return max(0, self.capacity_bytes - self.used_bytes)

    def processes(self) -> tuple[CardProcess, ...]:
        """List the live processes in the order of the slots."""
        slots = map(self._slot, range(_NUM_SLOTS))
        return tuple(
            CardProcess(pid, num_bytes, name.rstrip(b"\0").decode(errors="replace"))
            for pid, flags, num_bytes, name in slots
            if pid and (not flags & _LIVE or psutil.pid_exists(pid))
        )

    def hold(self, pid: int, num_bytes: int, name: str, live: bool = False) -> None:
        """Script a process: from now on it holds exactly this much.

        Args:
            pid: its process id, which need not exist. Your own adds to simgpu's reserved memory, as
                memory outside PyTorch does on a real card.
            num_bytes: the memory it holds, in bytes.
            name: its command, cut to 47 bytes.
            live: count it only while a process with this pid exists.

        Raises:
            ValueError: that much is not free (nothing is changed then), or all slots are taken.
        """
        if pid <= 0 or num_bytes < 0:
            raise ValueError(
                "a process has a positive pid and holds at least 0 bytes, got"
                f" {pid} and {num_bytes}"
            )
        index = self._find(pid, live)
        if index is None:
            index = self._find(0, None)
            if index is None:
                raise ValueError(f"all {_NUM_SLOTS} process slots of the card are taken")
            short_name = name.encode()[:47]
            _SLOT.pack_into(self._memory, _slot_at(index), pid, _LIVE if live else 0, 0, short_name)
        _, _, before, _ = self._slot(index)
        # As every process that takes memory does: add, check, undo if it was too much.
        self._set_bytes(index, num_bytes)
        if num_bytes > before and self.used_bytes > self.capacity_bytes:
            self._set_bytes(index, before)
            raise ValueError(
                f"process {pid} cannot hold {num_bytes} bytes: it holds {before}, and"
                f" {self.free_bytes} are free"
            )

    def release(self, pid: int) -> None:
        """Remove the script of a process, if there is one."""
        for live in (False, True):
            index = self._find(pid, live)
            if index is not None and not (live and pid == os.getpid()):  # that one is simgpu's own
                self._set_bytes(index, 0)
                _SLOT.pack_into(self._memory, _slot_at(index), 0, 0, 0, b"")

    def _slot(self, index: int) -> tuple[int, int, int, bytes]:
        slot: tuple[int, int, int, bytes] = _SLOT.unpack_from(self._memory, _slot_at(index))
        return slot

    def _set_bytes(self, index: int, num_bytes: int) -> None:
        self._words[_slot_at(index) // 8 + 1] = num_bytes  # after pid and flags

    def _find(self, pid: int, live: bool | None) -> int | None:
        for index in range(_NUM_SLOTS):
            found, flags, _, _ = self._slot(index)
            if found == pid and (live is None or bool(flags & _LIVE) == live):
                return index
        return None


def _slot_at(index: int) -> int:
    return _HEADER.size + index * _SLOT.size
