"""The blocks of AllocatorModel, and their pools."""

from bisect import bisect_left, insort
from dataclasses import dataclass


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

    @property
    def key(self) -> tuple[int, int, int]:
        """Return the sort key of free blocks: the first that is large enough is taken."""
        return self.size_bytes, self.number, self.address

    def cut(self, size_bytes: int, *, mapped: bool = True) -> "Block":
        """Keep this many bytes, and return the rest as a block behind them."""
        address, left = self.address + size_bytes, self.size_bytes - size_bytes
        rest = Block(self.pool, address, left, self.segment_start, mapped, self.number)
        rest.prev, rest.next = self, self.next
        if self.next is not None:
            self.next.prev = rest
        self.size_bytes, self.next = size_bytes, rest
        return rest

    def absorb(self, neighbour: "Block") -> None:
        """Join a free neighbour, which leaves its pool."""
        if neighbour.mapped:
            neighbour.pool.remove(neighbour)
        else:
            del neighbour.pool.unmapped[neighbour.address]
        self.address = min(self.address, neighbour.address)
        self.size_bytes += neighbour.size_bytes
        if neighbour.prev is not None:
            neighbour.prev.next = neighbour.next
        if neighbour.next is not None:
            neighbour.next.prev = neighbour.prev


class Pool:
    """The free blocks of one stream, small or large, in the order of `Block.key`."""

    def __init__(self, is_small: bool) -> None:
        self.is_small = is_small
        self.free: list[tuple[int, int, int, Block]] = []  # each behind its key
        # by address: the unmapped parts of expandable segments
        self.unmapped: dict[int, Block] = {}

    def add(self, block: Block) -> None:
        insort(self.free, (*block.key, block))

    def remove(self, block: Block) -> None:
        del self.free[bisect_left(self.free, block.key)]

    def free_blocks(self) -> list[Block]:
        return [block for *_, block in self.free]

    def find(self, size_bytes: int) -> int:
        """Return the place of the first free block that is large enough."""
        return bisect_left(self.free, (size_bytes, -1, -1))


def room_of(block: Block) -> int:
    """Return the size to which a block of an expandable segment can grow."""
    behind = block.next
    return block.size_bytes + (behind.size_bytes if behind is not None and not behind.mapped else 0)
