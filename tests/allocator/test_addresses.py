"""Where new segments lie: in the newest chunk with room, else in a new one, as the driver takes address space."""

from itertools import pairwise

import pytest

from trainer_plugins.allocator.addresses import ChunkedAddresses
from trainer_plugins.allocator.model import AllocatorModel, AllocatorRules, first_of_a_size
from trainer_plugins.units import MIB


def taken(rule: ChunkedAddresses, *sizes_mib: int) -> list[int]:
    """Where segments come to lie, in MiB below the end of the address space."""
    return [(0x7F00_0000_0000 - rule.take(size * MIB)) // MIB for size in sizes_mib]


def test_on_linux_segments_fall_by_chunks_of_32_mib() -> None:
    assert taken(ChunkedAddresses(), 20, 20, 20) == [32, 64, 96]
    assert taken(ChunkedAddresses(), 40, 33, 32) == [64, 128, 160]


def test_what_is_left_of_the_newest_chunk_is_filled_from_its_lowest_place_on() -> None:
    rule = ChunkedAddresses()
    assert taken(rule, 20, 20, 2, 10, 12) == [32, 64, 64 - 20, 64 - 22, 32 - 20]
    assert taken(rule, 2) == [96], "12 of 12 MiB are taken in both"


def test_a_chunk_goes_back_with_its_last_segment_and_the_highest_gap_is_taken_again() -> None:
    rule = ChunkedAddresses()
    places = [rule.take(size * MIB) for size in (64, 20, 64, 20, 20)]
    rule.give_back(places[0], 64 * MIB)
    rule.give_back(places[2], 64 * MIB)
    assert taken(rule, 64) == [64], "the highest one, in full"
    assert taken(rule, 32) == [128], "the next one, from its upper end down"
    assert taken(rule, 24) == [160], "and the rest of that gap"
    rule.give_back(places[4], 20 * MIB)
    assert taken(rule, 40) == [288 - 32], "what lies below all is as if never taken"


def test_gaps_that_meet_are_one() -> None:
    rule = ChunkedAddresses()
    _, second, third, _ = (rule.take(32 * MIB) for _ in range(4))
    rule.give_back(second, 32 * MIB)
    rule.give_back(third, 32 * MIB)
    assert taken(rule, 64) == [96]


def test_no_two_segments_share_an_address_whatever_comes_and_goes() -> None:
    rule = ChunkedAddresses()
    held: dict[int, int] = {}
    for number in range(400):
        if number % 3 == 2:
            address = sorted(held)[number % len(held)]
            rule.give_back(address, held.pop(address))
        size = (2, 10, 20, 34, 64, 14)[number % 6] * MIB
        held[rule.take(size)] = size
    ends = sorted((address, address + size) for address, size in held.items())
    assert all(end <= start for (_, end), (start, _) in pairwise(ends))
    assert len(held) == 400 - 133


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
