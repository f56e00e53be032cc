"""The CUDA caching allocator in arithmetic: which segments a series of allocations takes, without a card.

It follows c10/cuda/CUDACachingAllocator.cpp and c10/core/AllocatorConfig.h of torch 2.13, rule by
rule and in their names: rounding, the small and the large pool of each stream, best fit, splitting
and merging, expandable segments, `max_split_size_mb`, `garbage_collection_threshold`,
`roundup_power2_divisions`, the fraction of a process, and what happens when a card is full. Not
here: private pools of CUDA graphs, and blocks that wait for another stream.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass

from trainer_plugins.allocator.settings import NUM_INTERVALS, AllocatorSettings
from trainer_plugins.units import MIB

MIN_BLOCK_BYTES = 512
"""Every size is rounded up to a multiple of this."""

_SMALL_BYTES = 1 * MIB  # the largest allocation of the small pool
_SMALL_SEGMENT_BYTES = 2 * MIB
_MIN_LARGE_BYTES = 10 * MIB  # below this a large allocation shares a segment of the large pool
_LARGE_SEGMENT_BYTES = 20 * MIB
_ROUND_LARGE_BYTES = 2 * MIB
_UNLIMITED = 1 << 62
_GAP_BYTES = 2 * MIB  # between segments, so that none are neighbours


# says a state, as torch.OutOfMemoryError's own name does
class AllocatorFull(Exception):  # noqa: N818
    """The card has not so much left, also after the cache has been given back."""

    def __init__(self, requested_bytes: int, allocated_bytes: int, reserved_bytes: int) -> None:
        super().__init__(requested_bytes, allocated_bytes, reserved_bytes)
        self.requested_bytes = requested_bytes
        self.allocated_bytes = allocated_bytes
        self.reserved_bytes = reserved_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorRules:
    """The settings that decide where memory comes from; sizes in bytes. The defaults are CUDA's."""

    expandable_segments: bool = False
    max_split_bytes: int = _UNLIMITED
    garbage_collection_threshold: float = 0.0
    """Counts only together with `memory_fraction`, as in torch."""

    roundup_divisions: tuple[int, ...] = (0,) * NUM_INTERVALS
    memory_fraction: float | None = None
    """The share of the card that this process may reserve; None is all of it."""

    large_segment_bytes: int = _LARGE_SEGMENT_BYTES
    rising_segment_bytes: int = 32 * MIB
    """A new segment up to this size lies above the earlier ones of such a size, a larger one below
    the earlier large ones, which decides between free blocks of one size. No source of CUDA's says
    so. It was learned from 16 published figures of a T4 (`tests/planner/published.toml`, fitcheck
    2026-09-15): missed by up to 9 % where all segments rise, 0.3 % where those above 2 MiB fall,
    0.03 % with any size from 20 to 40 MiB, 0.6 % with 48 and 64. 32 MiB is a choice among those,
    and so is that what falls lies above what rises. On 53 figures of an L40S, which taught nothing
    of it, all these choices differ by 1 % at most, and by 0.03 % in the mean. 0 is how Linux maps
    host memory (simgpu)."""

    @classmethod
    def of(cls, settings: AllocatorSettings) -> "AllocatorRules":
        """Take what a text of PYTORCH_ALLOC_CONF says.

        Raises:
            ValueError: it names another backend than the native one.
        """
        values = settings.values
        if values.get("backend", "native") != "native":
            raise ValueError(
                f"not predicted: the allocator backend {values['backend']}, only native is modelled"
            )
        given: dict[str, object] = {}
        for key, name in (
            ("max_split_size_mb", "max_split_bytes"),
            ("large_segment_size_mb", "large_segment_bytes"),
        ):
            if isinstance(megabytes := values.get(key), int):
                given[name] = min(megabytes * MIB, _UNLIMITED)
        for key, name in (
            ("expandable_segments", "expandable_segments"),
            ("garbage_collection_threshold", "garbage_collection_threshold"),
            ("roundup_power2_divisions", "roundup_divisions"),
            ("per_process_memory_fraction", "memory_fraction"),
        ):
            if key in values:
                given[name] = values[key]
        return cls(**given)  # type: ignore[arg-type]


class Block:
    """A piece of a segment; what `malloc` hands out, and `free` takes."""

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
        self, pool: "_Pool", address: int, size_bytes: int, segment_start: int | None, mapped: bool
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


class _Pool:
    """The free blocks of one stream, small or large, by size and then address."""

    def __init__(self, is_small: bool) -> None:
        self.is_small = is_small
        self.keys: list[tuple[int, int]] = []
        self.blocks: dict[tuple[int, int], Block] = {}
        self.unmapped: dict[
            int, Block
        ] = {}  # addresses of expandable segments without memory behind them

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


class AllocatorModel:
    """One card's allocator.

    Args:
        capacity_bytes: what the process can reserve in all; None is a card without an end.
        rules: its settings.
    """

    def __init__(
        self, capacity_bytes: int | None = None, rules: AllocatorRules | None = None
    ) -> None:
        self.rules = rules if rules is not None else AllocatorRules()
        self.capacity_bytes = capacity_bytes if capacity_bytes is not None else _UNLIMITED
        fraction = self.rules.memory_fraction
        self._allowed_bytes = int(self.capacity_bytes * fraction) if fraction is not None else None
        self.allocated_bytes = self.reserved_bytes = 0
        self.peak_allocated_bytes = self.peak_reserved_bytes = 0
        self.num_retries = 0
        """How often the whole cache was given back because the card was full (`num_alloc_retries`)."""

        self._pools: dict[tuple[int, bool], _Pool] = {}
        self._highest_address, self._lowest_address = 1 << 45, 1 << 46
        self._num_lookups = 0  # the clock of garbage collection
        collects = fraction is not None and self.rules.garbage_collection_threshold > 0
        self._collect_above_bytes = (
            int(self.rules.garbage_collection_threshold * (self._allowed_bytes or 0))
            if collects
            else None
        )

    def reset_peaks(self) -> None:
        """Let the peaks begin at what is held now, as `reset_peak_memory_stats` does."""
        self.peak_allocated_bytes, self.peak_reserved_bytes = (
            self.allocated_bytes,
            self.reserved_bytes,
        )

    def malloc(self, num_bytes: int, stream: int = 0) -> Block:
        """Allocate.

        Raises:
            AllocatorFull: after a retry with an empty cache. Nothing is allocated then, and the
                cache is empty.
        """
        size = self.round_size(num_bytes)
        is_small = size <= _SMALL_BYTES
        pool = self._pools.setdefault((stream, is_small), _Pool(is_small))
        block = self._find_free(pool, size)
        if block is None:
            self._collect_garbage()
            block = self._grow(pool, size)
        if block is None and self._release_available(pool, size):
            block = self._grow(pool, size)
        if block is None:
            self.empty_cache()
            self.num_retries += 1
            block = self._grow(pool, size)
        if block is None:
            raise AllocatorFull(size, self.allocated_bytes, self.reserved_bytes)
        if self._should_split(block, size):
            self._split(block, size)
        block.in_use = True
        self.allocated_bytes += block.size_bytes
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return block

    def free(self, block: Block) -> None:
        """Give a block back to its pool, where it merges with its free neighbours."""
        self.allocated_bytes -= block.size_bytes
        block.in_use = False
        self._merge(block)
        block.last_used = self._num_lookups
        block.pool.add(block)

    def empty_cache(self) -> None:
        """Give every segment without a live block, and every free page of an expandable one, back to the card."""
        for pool in sorted(self._pools.values(), key=lambda pool: pool.is_small):
            for block in pool.free_blocks():
                if pool.blocks.get((block.size_bytes, block.address)) is not block:
                    continue  # merged into a neighbour on the way
                if block.segment_start is not None:
                    self._unmap(block)
                elif not block.is_split:
                    self._release(block)

    def round_size(self, num_bytes: int) -> int:
        """What is allocated for so many bytes."""
        if num_bytes < MIN_BLOCK_BYTES:
            return MIN_BLOCK_BYTES
        interval = min(max((num_bytes.bit_length() - 1) - 20, 0), NUM_INTERVALS - 1)
        divisions = self.rules.roundup_divisions[interval]
        if divisions > 1 and num_bytes > MIN_BLOCK_BYTES * divisions:
            floor = 1 << (num_bytes.bit_length() - 1)
            if num_bytes == floor:
                return num_bytes
            step = floor // divisions
            return _round_up(num_bytes, step) if step else 2 * floor
        return _round_up(num_bytes, MIN_BLOCK_BYTES)

    # Finding, and growing.

    def _find_free(self, pool: _Pool, size: int) -> Block | None:
        self._num_lookups += 1
        index = bisect_left(pool.keys, (size, -1))
        if index == len(pool.keys):
            return None
        block = pool.blocks[pool.keys[index]]
        if block.segment_start is not None:
            # Of the blocks in expandable segments the one with the least room to grow behind it.
            for key in pool.keys[index + 1 :]:
                other = pool.blocks[key]
                if block.segment_start is None or _room(other) >= _room(block):
                    break
                block = other
        limit = self.rules.max_split_bytes
        if size < limit <= block.size_bytes:
            return None
        if size >= limit and block.size_bytes >= size + self.rules.large_segment_bytes:
            return None
        pool.remove(block)
        return block

    def _segment_bytes(self, size: int) -> int:
        if size <= _SMALL_BYTES:
            return _SMALL_SEGMENT_BYTES
        if size < min(_MIN_LARGE_BYTES, self.rules.large_segment_bytes):
            return self.rules.large_segment_bytes
        return _round_up(size, _ROUND_LARGE_BYTES)

    def _has_room(self, num_bytes: int) -> bool:
        limit = self.capacity_bytes
        if self._allowed_bytes is not None:
            limit = min(limit, self._allowed_bytes)
        return self.reserved_bytes + num_bytes <= limit

    def _reserve(self, num_bytes: int) -> None:
        self.reserved_bytes += num_bytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)

    def _new_addresses(self, num_bytes: int) -> int:
        if num_bytes > self.rules.rising_segment_bytes:
            self._lowest_address -= num_bytes + _GAP_BYTES
            return self._lowest_address
        self._highest_address += num_bytes + _GAP_BYTES
        return self._highest_address - num_bytes

    def _grow(self, pool: _Pool, size: int) -> Block | None:
        if self.rules.expandable_segments:
            return self._grow_expandable(pool, size)
        num_bytes = self._segment_bytes(size)
        if not self._has_room(num_bytes):
            return None
        self._reserve(num_bytes)
        return Block(pool, self._new_addresses(num_bytes), num_bytes, None, mapped=True)

    # Splitting, and merging.

    def _should_split(self, block: Block, size: int) -> bool:
        remaining = block.size_bytes - size
        if block.pool.is_small or self.rules.expandable_segments:
            return remaining >= MIN_BLOCK_BYTES
        return size < self.rules.max_split_bytes and remaining > _SMALL_BYTES

    def _split(self, block: Block, size: int) -> None:
        rest = Block(
            block.pool,
            block.address + size,
            block.size_bytes - size,
            block.segment_start,
            mapped=True,
        )
        rest.last_used = self._num_lookups
        _insert_behind(block, rest)
        block.size_bytes = size
        block.pool.add(rest)

    def _merge(self, block: Block) -> None:
        before, behind = block.prev, block.next
        if before is not None and not before.in_use and before.mapped == block.mapped:
            _drop(before)
            block.address, block.prev = before.address, before.prev
            block.size_bytes += before.size_bytes
            if block.prev is not None:
                block.prev.next = block
        if behind is not None and not behind.in_use and behind.mapped == block.mapped:
            _drop(behind)
            block.next = behind.next
            block.size_bytes += behind.size_bytes
            if block.next is not None:
                block.next.prev = block

    # Giving back.

    def _release(self, block: Block) -> None:
        block.pool.remove(block)
        self.reserved_bytes -= block.size_bytes

    def _release_available(self, pool: _Pool, size: int) -> bool:
        """Before the whole cache goes: of the blocks too large to be split, just enough."""
        limit = self.rules.max_split_bytes
        if limit >= _UNLIMITED:
            return False
        wanted = max(size, limit)
        index = bisect_left(pool.keys, (wanted, -1))
        if index < len(pool.keys):
            block = pool.blocks[pool.keys[index]]
            if block.segment_start is None:
                self._release(block)
                return True
        released = 0
        for key in reversed(pool.keys[:index]):
            if released >= wanted or key[0] < limit:
                break
            block = pool.blocks[key]
            if block.segment_start is None:
                released += block.size_bytes
                self._release(block)
        return released >= wanted

    def _collect_garbage(self) -> None:
        """Give back the large blocks that have not been used for longest, until the threshold is kept."""
        if self._collect_above_bytes is None:
            return
        missing = self.reserved_bytes - self._collect_above_bytes
        candidates = [
            block
            for pool in self._pools.values()
            if not pool.is_small
            for block in pool.free_blocks()
            if not block.is_split and block.segment_start is None
        ]
        while missing > 0 and candidates:
            ages = [self._num_lookups - block.last_used for block in candidates]
            threshold = sum(ages) / len(ages)
            old = [block for block, age in zip(candidates, ages, strict=True) if age >= threshold]
            candidates = [
                block for block, age in zip(candidates, ages, strict=True) if age < threshold
            ]
            for block in old:
                missing -= block.size_bytes
                self._release(block)

    # Expandable segments: one range of addresses for each pool, with memory mapped into it page by
    # page.

    def _grow_expandable(self, pool: _Pool, size: int) -> Block | None:
        candidate = self._addresses_for(pool, size)
        if not candidate.mapped and not self._map(candidate, min(candidate.size_bytes, size)):
            return None
        while candidate.size_bytes < size:
            behind = candidate.next
            if behind is None or not self._map(
                behind, min(size - candidate.size_bytes, behind.size_bytes)
            ):
                return None
            candidate = behind  # it has merged with what was before it
        pool.remove(candidate)
        return candidate

    def _addresses_for(self, pool: _Pool, size: int) -> Block:
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
        start = self._new_addresses(num_bytes)
        whole = Block(pool, start, num_bytes, start, mapped=False)
        pool.unmapped[start] = whole
        return whole

    def _page_bytes(self, pool: _Pool) -> int:
        return _SMALL_SEGMENT_BYTES if pool.is_small else self.rules.large_segment_bytes

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
            rest = Block(
                block.pool, end, block.size_bytes - num_bytes, block.segment_start, mapped=False
            )
            _insert_behind(block, rest)
            block.size_bytes = num_bytes
            block.pool.unmapped[end] = rest
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
            before = Block(pool, block.address, first - block.address, start, mapped=True)
            before.prev, before.next = block.prev, block
            if block.prev is not None:
                block.prev.next = before
            block.prev = before
            pool.add(before)
        end = block.address + block.size_bytes
        if end > last:
            behind = Block(pool, last, end - last, start, mapped=True)
            _insert_behind(block, behind)
            pool.add(behind)
        block.address, block.size_bytes, block.mapped = first, last - first, False
        self.reserved_bytes -= last - first
        self._merge(block)
        pool.unmapped[block.address] = block


def _round_up(number: int, step: int) -> int:
    return -(-number // step) * step


def _room(block: Block) -> int:
    """What a block of an expandable segment can grow to."""
    behind = block.next
    return block.size_bytes + (behind.size_bytes if behind is not None and not behind.mapped else 0)


def _insert_behind(block: Block, new: Block) -> None:
    new.prev, new.next = block, block.next
    if block.next is not None:
        block.next.prev = new
    block.next = new


def _drop(block: Block) -> None:
    """Take a free block out of its pool because a neighbour swallows it."""
    if block.mapped:
        block.pool.remove(block)
    else:
        del block.pool.unmapped[block.address]
