"""Places blocks at the addresses seen in traces of real cards (docs/internals/measurements.md)."""

from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import Protocol

from trainer_plugins.units import MIB

_CHUNK_BYTES = 32 * MIB
_TOP = 0x7F00_0000_0000


class Addresses(Protocol):
    """Assigns addresses to new segments, and takes back those of released ones."""

    def take(self, num_bytes: int) -> int:
        """Return the address of a new segment."""

    def give_back(self, address: int, num_bytes: int) -> None:
        """Record the release of a segment."""


class ChunkedAddresses:
    """Places segments as the CUDA driver does on Linux: in chunks of 32 MiB or a multiple.

    A segment goes into the newest chunk with room, at the lowest free address. Otherwise it gets a
    new chunk: in the highest released range that is large enough, or else right below all others.
    """

    def __init__(self) -> None:
        self._chunks: list[_Chunk] = []  # oldest first
        self._chunk_at: dict[int, _Chunk] = {}  # by the address of the segment
        self._gaps: list[tuple[int, int]] = []  # released ranges: low and high address
        self._end = _TOP  # the address space below was never used

    def take(self, num_bytes: int) -> int:
        for chunk in reversed(self._chunks):
            address = chunk.room_for(num_bytes)
            if address is not None:
                break
        else:
            chunk = self._new_chunk(-(-num_bytes // _CHUNK_BYTES) * _CHUNK_BYTES)
            address = chunk.base
        self._put(chunk, address, num_bytes)
        return address

    def give_back(self, address: int, num_bytes: int) -> None:
        """Release a segment, and its chunk if that is now empty."""
        chunk = self._chunk_at.pop(address)
        chunk.segments.remove((address, num_bytes))
        chunk.free_bytes += num_bytes
        if chunk.segments:
            return
        self._chunks.remove(chunk)
        low, high = chunk.base, chunk.end
        for gap in [gap for gap in self._gaps if low == gap[1] or gap[0] == high]:
            self._gaps.remove(gap)
            low, high = min(low, gap[0]), max(high, gap[1])
        if low == self._end:  # at the bottom: treat as never used
            self._end = high
        else:
            self._gaps.append((low, high))

    def _put(self, chunk: "_Chunk", address: int, num_bytes: int) -> None:
        insort(chunk.segments, (address, num_bytes))
        chunk.free_bytes -= num_bytes
        self._chunk_at[address] = chunk

    def _new_chunk(self, num_bytes: int) -> "_Chunk":
        fitting = [gap for gap in self._gaps if gap[1] - gap[0] >= num_bytes]
        if fitting:
            low, high = max(fitting)
            base = high - num_bytes
            self._gaps.remove((low, high))
            if low < base:
                self._gaps.append((low, base))
        else:
            base = self._end = self._end - num_bytes
        chunk = _Chunk(base, num_bytes)
        self._chunks.append(chunk)
        return chunk


class _Chunk:
    """A range of address space with its segments, sorted by address."""

    def __init__(self, base: int, num_bytes: int) -> None:
        self.base = base
        self.num_bytes = self.free_bytes = num_bytes
        self.segments: list[tuple[int, int]] = []

    @property
    def end(self) -> int:
        return self.base + self.num_bytes

    def room_for(self, num_bytes: int) -> int | None:
        """Return the lowest address with enough room; None if there is none."""
        if self.free_bytes < num_bytes:
            return None
        position = self.base
        for address, size in self.segments:
            if address - position >= num_bytes:
                return position
            position = address + size
        return position if self.end - position >= num_bytes else None


@dataclass(eq=False, slots=True)
class Block:
    """A piece of a segment, which `malloc` returns and `free` takes back."""

    pool: "Pool"
    address: int
    size_bytes: int
    segment_start: int | None  # start of an expandable segment; None for other segments
    mapped: bool
    number: int  # sequence number of its segment, or its own; 0 if unused
    in_use: bool = False
    prev: "Block | None" = None
    next: "Block | None" = None
    last_used: int = 0

    @property
    def key(self) -> tuple[int, int, int]:
        """Return the sort key of free blocks: the first that is large enough is taken."""
        return self.size_bytes, self.number, self.address

    def sibling(self, address: int, size_bytes: int, *, mapped: bool = True) -> "Block":
        """Return another piece of the same segment, not linked yet."""
        return Block(self.pool, address, size_bytes, self.segment_start, mapped, self.number)

    @property
    def is_split(self) -> bool:
        return self.prev is not None or self.next is not None


class Pool:
    """The free blocks of one stream, small or large, in the order of `Block.key`."""

    def __init__(self, is_small: bool) -> None:
        self.is_small = is_small
        self.keys: list[tuple[int, int, int]] = []
        self.blocks: dict[tuple[int, int, int], Block] = {}
        # by address: the unmapped parts of expandable segments
        self.unmapped: dict[int, Block] = {}

    def add(self, block: Block) -> None:
        key = block.key
        insort(self.keys, key)
        self.blocks[key] = block

    def remove(self, block: Block) -> None:
        key = block.key
        del self.keys[bisect_left(self.keys, key)]
        del self.blocks[key]

    def free_blocks(self) -> list[Block]:
        return [self.blocks[key] for key in self.keys]


def room_of(block: Block) -> int:
    """Return the size to which a block of an expandable segment can grow."""
    behind = block.next
    return block.size_bytes + (behind.size_bytes if behind is not None and not behind.mapped else 0)


def insert_behind(block: Block, new: Block) -> None:
    """Link a new block into its segment, right behind `block`."""
    new.prev, new.next = block, block.next
    if block.next is not None:
        block.next.prev = new
    block.next = new


def drop(block: Block) -> None:
    """Remove a free block that a neighbour absorbs from its pool."""
    if block.mapped:
        block.pool.remove(block)
    else:
        del block.pool.unmapped[block.address]
