"""The allocator's arithmetic, against an allocator in C++ that follows the same file, and what torch documents."""

import itertools
import random

import pytest
import torch

from trainer_plugins.allocator.model import (
    AllocatorFull,
    AllocatorModel,
    AllocatorRules,
    Block,
    first_of_a_size,
)
from trainer_plugins.units import GIB, MIB

EXPANDABLE = AllocatorRules(expandable_segments=True)


def sizes(chance: random.Random) -> int:
    return chance.choice(
        (
            chance.randint(1, 4096),
            chance.randint(1, MIB),
            chance.randint(MIB, 10 * MIB),
            chance.randint(10 * MIB, 60 * MIB),
        )
    )


@pytest.mark.parametrize("seed", range(4))
def test_it_reserves_what_the_simulated_card_reserves(simgpu, seed):
    """The card counts what C++ does with real addresses, out of memory and retries included."""
    capacity = 256 * MIB
    model = AllocatorModel(capacity)
    chance = random.Random(seed)
    live: list[tuple[torch.Tensor, Block]] = []
    before = torch.accelerator.memory_stats()
    refused = 0
    torch.accelerator.empty_cache()
    for _ in range(1500):
        if live and chance.random() < 0.45:
            tensor, block = live.pop(chance.randrange(len(live)))
            del tensor
            model.free(block)
        else:
            num_bytes = sizes(chance)
            try:
                tensor = torch.empty(num_bytes, dtype=torch.uint8, device="simgpu")
            except torch.OutOfMemoryError:
                refused += 1
                with pytest.raises(AllocatorFull):
                    model.malloc(num_bytes)
                for _ in range(len(live) // 2):
                    tensor, block = live.pop()
                    del tensor
                    model.free(block)
            else:
                live.append((tensor, model.malloc(num_bytes)))
                del tensor
        assert model.allocated_bytes == torch.accelerator.memory_allocated()
        assert model.reserved_bytes == torch.accelerator.memory_reserved()
    stats = torch.accelerator.memory_stats()
    assert refused > 0
    assert stats["num_alloc_retries"] - before["num_alloc_retries"] == model.num_retries
    live.clear()


@pytest.mark.parametrize(
    "rules",
    [
        AllocatorRules(),
        EXPANDABLE,
        AllocatorRules(max_split_bytes=64 * MIB),
        AllocatorRules(max_split_bytes=32 * MIB, expandable_segments=True),
    ],
)
def test_nothing_is_left_behind(rules):
    chance = random.Random(str(rules))
    model = AllocatorModel(GIB, rules)
    live: list[tuple[Block, int]] = []
    for _ in range(4000):
        if live and chance.random() < 0.48:
            model.free(live.pop(chance.randrange(len(live)))[0])
        else:
            num_bytes = sizes(chance)
            try:
                live.append((model.malloc(num_bytes), num_bytes))
            except AllocatorFull:
                for _ in range(min(len(live), 8)):
                    model.free(live.pop(chance.randrange(len(live)))[0])
        assert (
            model.allocated_bytes
            == sum(block.size_bytes for block, _ in live)
            <= model.reserved_bytes
            <= GIB
        )
        taken = sorted((block.address, block.address + block.size_bytes) for block, _ in live)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(taken))
        assert all(block.size_bytes >= num_bytes for block, num_bytes in live)
    for block, _ in live:
        model.free(block)
    model.empty_cache()
    assert (model.allocated_bytes, model.reserved_bytes) == (0, 0)


def test_blocks_above_max_split_size_are_kept_whole():
    model = AllocatorModel(GIB, AllocatorRules(max_split_bytes=40 * MIB))
    model.free(model.malloc(100 * MIB))
    small = model.malloc(30 * MIB)  # does not break the block of 100 MiB
    assert model.reserved_bytes == 130 * MIB
    large = model.malloc(90 * MIB)  # may take it whole, as less than 20 MiB are wasted
    assert large.size_bytes == 100 * MIB
    assert model.reserved_bytes == 130 * MIB
    model.free(small)
    model.free(large)


def test_each_stream_has_pools_of_its_own():
    model = AllocatorModel()
    model.free(model.malloc(50 * MIB, stream=0))
    model.malloc(50 * MIB, stream=1)
    assert model.reserved_bytes == 100 * MIB


@pytest.mark.parametrize(
    ("torch", "taken"),
    [("2.11.0", "new"), ("2.12.1", "new"), ("2.13.0", "old"), ("2.14.0+cu130", "old")],
)
def test_versions_take_another_of_equal_free_blocks(torch: str, taken: str) -> None:
    """As the addresses of dry runs show, with these versions' own code."""
    model = AllocatorModel(rules=AllocatorRules(first_of_a_size=first_of_a_size(torch)))
    old, new = model.malloc(40 * MIB), model.malloc(40 * MIB)
    old_at, new_at = old.address, new.address
    assert new_at < old_at
    model.free(old)
    first, second = model.malloc(20 * MIB), model.malloc(20 * MIB)  # cut from the old one
    model.free(second)
    model.free(first)  # it absorbs the second, and is younger than the new segment
    model.free(new)
    assert model.malloc(40 * MIB).address == {"old": old_at, "new": new_at}[taken]
