"""The allocator's arithmetic, against an allocator in C++ that follows the same file, and what torch documents."""

import itertools
import random

import pytest
import torch

from trainer_plugins.allocator.model import AllocatorFull, AllocatorModel, AllocatorRules, Block
from trainer_plugins.allocator.settings import parse
from trainer_plugins.units import GIB, MIB


def rules(text: str) -> AllocatorRules:
    return AllocatorRules.of(parse(text))


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
    "text",
    [
        "",
        "expandable_segments:True",
        "max_split_size_mb:64",
        "max_split_size_mb:32,expandable_segments:True",
        "garbage_collection_threshold:0.5,per_process_memory_fraction:0.9",
        "roundup_power2_divisions:8",
    ],
)
def test_nothing_is_left_behind(text):
    chance = random.Random(text)
    model = AllocatorModel(GIB, rules(text))
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


def test_sizes_are_rounded_to_divisions_of_a_power_of_2():
    """The example of torch's notes on CUDA: 1200 with 4 divisions is 1280.

    There in MiB, where the intervals are.
    """
    model = AllocatorModel(rules=rules("roundup_power2_divisions:4"))
    assert model.round_size(1200 * MIB) == 1280 * MIB
    assert model.round_size(1024 * MIB) == 1024 * MIB
    only_large = AllocatorModel(rules=rules("roundup_power2_divisions:[256:1,512:2,1024:4,>:8]"))
    assert only_large.round_size(1200 * MIB) == 1280 * MIB
    assert only_large.round_size(600 * MIB) == 768 * MIB
    assert only_large.round_size(300 * MIB) == 300 * MIB
    assert only_large.round_size(4097 * MIB) == 4608 * MIB


def test_expandable_segments_grow_where_others_are_left_with_holes():
    def reserved_after(text: str) -> int:
        model = AllocatorModel(2 * GIB, rules(text))
        for megabytes in (100, 120, 140, 160):  # a run whose sequences grow
            model.free(model.malloc(megabytes * MIB))
        return model.reserved_bytes

    assert reserved_after("expandable_segments:True") == 160 * MIB
    assert reserved_after("") == 520 * MIB


def test_expandable_segments_fit_where_others_do_not():
    """A live block of 100 MiB in a segment of 600 holds all of it, but for a segment that gives single pages back."""
    fragmented = AllocatorModel(700 * MIB)
    fragmented.free(fragmented.malloc(600 * MIB))
    fragmented.malloc(100 * MIB)
    with pytest.raises(AllocatorFull) as raised:
        fragmented.malloc(550 * MIB)
    assert (raised.value.requested_bytes, raised.value.reserved_bytes) == (550 * MIB, 600 * MIB)
    assert fragmented.num_retries == 1

    grown = AllocatorModel(700 * MIB, rules("expandable_segments:True"))
    grown.free(grown.malloc(600 * MIB))
    grown.malloc(100 * MIB)
    assert grown.malloc(550 * MIB).size_bytes == 550 * MIB
    assert grown.num_retries == 0


def test_blocks_above_max_split_size_are_kept_whole():
    model = AllocatorModel(GIB, rules("max_split_size_mb:40"))
    model.free(model.malloc(100 * MIB))
    small = model.malloc(30 * MIB)  # does not break the block of 100 MiB
    assert model.reserved_bytes == 130 * MIB
    large = model.malloc(90 * MIB)  # may take it whole, as less than 20 MiB are wasted
    assert large.size_bytes == 100 * MIB
    assert model.reserved_bytes == 130 * MIB
    model.free(small)
    model.free(large)


def test_what_another_stream_reads_is_used_again_when_it_was_read():
    model = AllocatorModel(100 * MIB)
    number = model.leave(model.malloc(40 * MIB))
    assert (model.allocated_bytes, model.reserved_bytes) == (0, 40 * MIB)
    other = model.malloc(40 * MIB)
    assert model.reserved_bytes == 80 * MIB

    model.come_back(number)
    model.malloc(40 * MIB)
    assert model.reserved_bytes == 80 * MIB

    model.leave(other)  # and nobody says that it was read: a full card waits
    model.malloc(60 * MIB)
    assert (model.num_retries, model.reserved_bytes) == (1, 100 * MIB)


def test_each_stream_has_pools_of_its_own():
    model = AllocatorModel()
    model.free(model.malloc(50 * MIB, stream=0))
    model.malloc(50 * MIB, stream=1)
    assert model.reserved_bytes == 100 * MIB


def test_a_fraction_of_the_card_is_all_there_is():
    model = AllocatorModel(GIB, rules("per_process_memory_fraction:0.25"))
    model.malloc(200 * MIB)
    with pytest.raises(AllocatorFull):
        model.malloc(100 * MIB)


def test_another_backend_is_not_predicted():
    with pytest.raises(ValueError, match="not predicted: the allocator backend cudaMallocAsync"):
        rules("backend:cudaMallocAsync")
