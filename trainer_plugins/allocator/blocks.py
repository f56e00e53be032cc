"""Blocks of segments, and the pools of free ones, as CUDA's caching allocator has them."""

from bisect import bisect_left, insort


class Block:
    """Holds a piece of a segment, which `malloc` returns and `free` takes back."""

    __slots__ = (
        "address",
        "in_use",
        "last_used",
        "mapped",
        "next",
        "pool",
        "prev",
        "segment_start",
        "size_bytes",
    )

    def __init__(
        self, pool: "Pool", address: int, size_bytes: int, segment_start: int | None, mapped: bool
    ) -> None:
        self.pool = pool
        self.address = address
        self.size_bytes = size_bytes
        self.segment_start = segment_start  # of an expandable segment, None in others
        self.mapped = mapped
        self.in_use = False
        self.prev: Block | None = None  # neighbours in the segment
        self.next: Block | None = None
        self.last_used = 0

    @property
    def is_split(self) -> bool:
        return self.prev is not None or self.next is not None


class Pool:
    """Holds the free blocks of one stream, small or large, ordered by size, then address."""

    def __init__(self, is_small: bool) -> None:
        self.is_small = is_small
        self.keys: list[tuple[int, int]] = []
        self.blocks: dict[tuple[int, int], Block] = {}
        self.unmapped: dict[int, Block] = {}
        """By address: parts of expandable segments that have no memory mapped."""

    def add(self, block: Block) -> None:
        key = (block.size_bytes, block.address)
        insort(self.keys, key)
        self.blocks[key] = block

    def remove(self, block: Block) -> None:
        key = (block.size_bytes, block.address)
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
    """Take a free block out of its pool because a neighbour absorbs it."""
    if block.mapped:
        block.pool.remove(block)
    else:
        del block.pool.unmapped[block.address]
