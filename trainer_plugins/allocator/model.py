"""AllocatorModel computes the segments that CUDA's caching allocator takes, without a card.

It follows CUDACachingAllocator.cpp and AllocatorConfig.h of torch 2.13 rule by rule, with their
names. Not modelled: private pools of CUDA graphs, blocks that wait for another stream, and options
without a field in `AllocatorRules`.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

from trainer_plugins.allocator.blocks import Block, Pool, room_of
from trainer_plugins.units import MIB

__all__ = ["MIN_BLOCK_BYTES", "AllocatorFull", "AllocatorModel", "AllocatorRules", "Block"]

MIN_BLOCK_BYTES = 512  # all sizes are rounded up to a multiple of this
SMALL_BYTES = 1 * MIB  # the largest allocation of the small pool
SMALL_SEGMENT_BYTES, LARGE_SEGMENT_BYTES = 2 * MIB, 20 * MIB
UNLIMITED = 1 << 62
_TOP = 0x7F00_0000_0000
_MIN_LARGE_BYTES = 10 * MIB  # smaller requests share a segment of the large pool
_ROUND_LARGE_BYTES = 2 * MIB

FirstOfASize = Literal["address", "segment", "block"]
FIRST_OF_A_SIZE: tuple[FirstOfASize, ...] = get_args(FirstOfASize)


class AllocatorRules(NamedTuple):
    """The settings that determine where memory comes from, in bytes. Defaults are CUDA's."""

    expandable_segments: bool = False
    max_split_bytes: int = UNLIMITED
    # Among free blocks of one size: lowest address, oldest segment, or oldest block.
    first_of_a_size: FirstOfASize = "address"


# Named after a state, like torch.OutOfMemoryError.
class AllocatorFull(Exception):  # noqa: N818
    """The card cannot provide this many bytes, even after releasing the cache."""


class AllocatorModel:
    """Models the allocator of one card. Without a capacity, memory is unlimited.

    `take_address` returns the address of a new segment of so many bytes.
    """

    def __init__(
        self,
        capacity_bytes: int | None = None,
        rules: AllocatorRules | None = None,
        take_address: Callable[[int], int] | None = None,
    ) -> None:
        self.rules = rules if rules is not None else AllocatorRules()
        self._lowest, self._take_address = _TOP, take_address or self._take_below
        self.capacity_bytes = capacity_bytes if capacity_bytes is not None else UNLIMITED
        self.allocated_bytes = self.reserved_bytes = 0
        self.peak_allocated_bytes = self.peak_reserved_bytes = 0
        self.num_retries = 0  # like torch's `num_alloc_retries`
        self._num_numbered = 0
        self._pools: dict[tuple[int, bool], Pool] = {}

    def reset_peaks(self) -> None:
        """Reset the peaks to the current values, as `reset_peak_memory_stats` does."""
        self.peak_allocated_bytes = self.allocated_bytes
        self.peak_reserved_bytes = self.reserved_bytes

    def malloc(self, num_bytes: int, stream: int = 0) -> Block:
        """Allocate at least `num_bytes`; AllocatorFull if even a retry without cache fails."""
        size = round_size(num_bytes)
        is_small = size <= SMALL_BYTES
        pool = self._pools.get((stream, is_small))
        if pool is None:
            pool = self._pools[stream, is_small] = Pool(is_small)
        block = self._find_free(pool, size)
        if block is None:
            block = self._grow(pool, size)
        if block is None and self._release_available(pool, size):
            block = self._grow(pool, size)
        if block is None:
            self.empty_cache()
            self.num_retries += 1
            block = self._grow(pool, size)
        if block is None:
            raise AllocatorFull(size)
        if self._should_split(block, size):
            self._split(block, size)
        block.in_use = True
        self.allocated_bytes += block.size_bytes
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return block

    def free(self, block: Block) -> None:
        """Return a block to its pool, where it merges with its free neighbours."""
        self.allocated_bytes -= block.size_bytes
        block.in_use = False
        self._merge(block)
        block.pool.add(block)

    def empty_cache(self) -> None:
        """Release segments without live blocks, and free pages of expandable segments."""
        for pool in sorted(self._pools.values(), key=lambda pool: pool.is_small):
            for block in pool.free_blocks():
                if block.segment_start is not None:
                    self._unmap(block)
                elif block.prev is None and block.next is None:
                    self._release(block)

    def _take_below(self, num_bytes: int) -> int:
        """Place a new segment below all others, as the CUDA driver often does on Linux."""
        self._lowest -= num_bytes
        return self._lowest

    def _find_free(self, pool: Pool, size: int) -> Block | None:
        index = pool.find(size)
        if index == len(pool.free):
            return None
        *_, block = pool.free[index]
        if block.segment_start is not None:
            # Of the blocks in expandable segments, take the one with the least room to grow.
            for *_, other in pool.free[index + 1 :]:
                if block.segment_start is None or room_of(other) >= room_of(block):
                    break
                block = other
        limit = self.rules.max_split_bytes
        if size < limit <= block.size_bytes:
            return None
        if size >= limit and block.size_bytes >= size + LARGE_SEGMENT_BYTES:
            return None
        pool.remove(block)
        return block

    def segment_bytes(self, size: int) -> int:
        """Return the size of the segment that a request would need."""
        if size <= SMALL_BYTES:
            return SMALL_SEGMENT_BYTES
        if size < _MIN_LARGE_BYTES:
            return LARGE_SEGMENT_BYTES
        return _round_up(size, _ROUND_LARGE_BYTES)

    def _has_room(self, num_bytes: int) -> bool:
        return self.reserved_bytes + num_bytes <= self.capacity_bytes

    def _reserve(self, num_bytes: int) -> None:
        self.reserved_bytes += num_bytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)

    def _grow(self, pool: Pool, size: int) -> Block | None:
        if self.rules.expandable_segments:
            return self._grow_expandable(pool, size)
        num_bytes = self.segment_bytes(size)
        if not self._has_room(num_bytes):
            return None
        self._reserve(num_bytes)
        address, number = self._take_address(num_bytes), self._next_number()
        return Block(pool, address, num_bytes, None, mapped=True, number=number)

    def _next_number(self) -> int:
        self._num_numbered += self.rules.first_of_a_size != "address"
        return self._num_numbered

    def _should_split(self, block: Block, size: int) -> bool:
        remaining = block.size_bytes - size
        if block.pool.is_small or self.rules.expandable_segments:
            return remaining >= MIN_BLOCK_BYTES
        return size < self.rules.max_split_bytes and remaining > SMALL_BYTES

    def _split(self, block: Block, size: int) -> None:
        rest = block.cut(size)
        if self.rules.first_of_a_size == "block":  # the remainder is the old block
            block.number = self._next_number()
        block.pool.add(rest)

    def _merge(self, block: Block) -> None:
        for neighbour in (block.prev, block.next):
            if neighbour and not neighbour.in_use and neighbour.mapped == block.mapped:
                block.absorb(neighbour)

    def _release(self, block: Block) -> None:
        block.pool.remove(block)
        self.reserved_bytes -= block.size_bytes

    def _release_available(self, pool: Pool, size: int) -> bool:
        """Release just enough blocks too large to split, before giving up the whole cache."""
        limit = self.rules.max_split_bytes
        if limit >= UNLIMITED:
            return False
        wanted = max(size, limit)
        index = pool.find(wanted)
        if index < len(pool.free) and (block := pool.free[index][-1]).segment_start is None:
            self._release(block)
            return True
        released = 0
        for *_, block in reversed(pool.free[:index]):
            if released >= wanted or block.size_bytes < limit:
                break
            if block.segment_start is None:
                released += block.size_bytes
                self._release(block)
        return released >= wanted

    # Expandable segments: each pool has one address range, and pages are mapped into it.

    def _grow_expandable(self, pool: Pool, size: int) -> Block | None:
        candidate = self._addresses_for(pool, size)
        if not candidate.mapped and not self._map(candidate, min(candidate.size_bytes, size)):
            return None
        while candidate.size_bytes < size:
            behind = candidate.next
            if behind is None or not self._map(
                behind, min(size - candidate.size_bytes, behind.size_bytes)
            ):
                return None
            candidate = behind  # merged with the block before it
        pool.remove(candidate)
        return candidate

    def _addresses_for(self, pool: Pool, size: int) -> Block:
        for address in sorted(pool.unmapped):
            first = pool.unmapped[address]
            if first.prev is not None and not first.prev.in_use:
                first = first.prev
            room, block = 0, first
            while block is not None and room < size and not block.in_use:
                room += block.size_bytes
                block = block.next  # type: ignore[assignment]
            if room >= size:
                return first
        page = self._page_bytes(pool)
        num_bytes = _round_up(self.capacity_bytes + self.capacity_bytes // 8, page)
        start = self._take_address(num_bytes)
        number = self._next_number()
        whole = Block(pool, start, num_bytes, start, mapped=False, number=number)
        pool.unmapped[start] = whole
        return whole

    def _page_bytes(self, pool: Pool) -> int:
        return SMALL_SEGMENT_BYTES if pool.is_small else LARGE_SEGMENT_BYTES

    def _map(self, block: Block, num_bytes: int) -> bool:
        start = block.segment_start or 0
        end = start + _round_up(block.address + num_bytes - start, self._page_bytes(block.pool))
        num_bytes = end - block.address
        if not self._has_room(num_bytes):
            return False
        del block.pool.unmapped[block.address]
        block.mapped = True
        self._reserve(num_bytes)
        if num_bytes < block.size_bytes:
            block.pool.unmapped[end] = block.cut(num_bytes, mapped=False)
        self._merge(block)
        block.pool.add(block)
        return True

    def _unmap(self, block: Block) -> None:
        start, page = block.segment_start or 0, self._page_bytes(block.pool)
        first = start + _round_up(block.address - start, page)
        last = start + (block.address + block.size_bytes - start) // page * page
        if last <= first:
            return
        pool = block.pool
        pool.remove(block)
        if first > block.address:
            front, block = block, block.cut(first - block.address)
            pool.add(front)
        if last < block.address + block.size_bytes:
            pool.add(block.cut(last - first))
        block.mapped = False
        self.reserved_bytes -= last - first
        self._merge(block)
        pool.unmapped[block.address] = block


def first_of_a_size(torch_version: str) -> FirstOfASize:
    """Return which of several equal free blocks this torch takes.

    See pytorch#178362 and #183591. Each version's own code gave these addresses in dry runs.
    """
    torch = [int(number) for number in torch_version.split(".")[:2]]
    return "segment" if torch >= [2, 13] else "block" if torch == [2, 12] else "address"


def round_size(num_bytes: int) -> int:
    """Return the size of the block allocated for a request of `num_bytes`."""
    return _round_up(max(num_bytes, MIN_BLOCK_BYTES), MIN_BLOCK_BYTES)


def _round_up(number: int, step: int) -> int:
    return -(-number // step) * step
