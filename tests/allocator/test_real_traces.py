"""What real CUDA cards did, repeated by the model address by address.

`benchmarks/results/traces.txt` says whose traces these are, `docs/internals/measurements.md` what they do
not show. Each of these changes to the model, alone, turns `test_the_model_does_what_the_card_did`
red (`MUTATIONS` applies them): large blocks split from 512 B on; large segments of 24 MiB; segments
shared below 12 MiB; the small pool up to 0.5 MiB; the highest of equal blocks; no merging with the
block before; sizes rounded to 1024 B; segments rounded to 4 MiB; a cache that keeps its segments.
"""

import functools
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.snapshots import read, write
from benchmarks.traces import KEPT, main
from tests.explain.recorded import RecordedCard
from trainer_plugins.allocator import model as rules
from trainer_plugins.allocator.blocks import Pool
from trainer_plugins.allocator.model import AllocatorFull, AllocatorModel, Block
from trainer_plugins.snapshot.replay import Outcome, replay
from trainer_plugins.snapshot.trace import NotModelledError, Trace
from trainer_plugins.units import KIB, MIB

FILES = sorted(KEPT.glob("*.json.gz"))
IDS = [path.name.removesuffix(".json.gz") for path in FILES]


@functools.cache
def trace(name: str) -> Trace:
    (only,) = read(KEPT / f"{name}.json.gz")
    return only


@functools.cache
def outcome_of(name: str) -> Outcome:
    return replay(trace(name))


@pytest.mark.parametrize("name", IDS)
def test_the_model_does_what_the_card_did(name):
    only, outcome = trace(name), outcome_of(name)
    assert outcome.first_difference is None
    assert outcome.allocations == sum(event.action == "alloc" for event in only.events) > 0
    assert outcome.same_address == outcome.allocations
    assert outcome.replayed_peak_bytes == outcome.peak_bytes > 0


def test_together_they_show_growth_and_releases_and_both_kinds_of_segments():
    outcomes = {name: outcome_of(name) for name in IDS}
    assert len(outcomes) >= 10
    assert sum(outcome.allocations for outcome in outcomes.values()) > 30_000
    assert sum(outcome.growths for outcome in outcomes.values()) > 2_000
    events = [event for name in IDS for event in trace(name).events]
    assert sum(event.action == "segment_free" for event in events) >= 2
    assert {trace(name).expandable for name in IDS} == {True, False}


def _highest_of_equals(model: AllocatorModel, pool: Pool, size: int) -> Block | None:
    found = [block for block in pool.free_blocks() if block.size_bytes >= size]
    if not found:
        return None
    block = [each for each in found if each.size_bytes == found[0].size_bytes][-1]
    pool.remove(block)
    return block


def _merges_behind_only(merge: Callable[..., None]) -> Callable[..., None]:
    def merged(model: AllocatorModel, block: Block) -> None:
        before, block.prev = block.prev, None
        merge(model, block)
        block.prev = before

    return merged


MUTATIONS: dict[str, tuple[object, str, object]] = {
    "large blocks split from 512 B on": (
        AllocatorModel,
        "_should_split",
        lambda model, block, size: block.size_bytes - size >= 512,
    ),
    "large segments of 24 MiB": (rules, "LARGE_SEGMENT_BYTES", 24 * MIB),
    "segments shared below 12 MiB": (rules, "_MIN_LARGE_BYTES", 12 * MIB),
    "the small pool up to 0.5 MiB": (rules, "SMALL_BYTES", 512 * KIB),
    "the highest of equal blocks": (AllocatorModel, "_find_free", _highest_of_equals),
    "no merging with the block before": (
        AllocatorModel,
        "_merge",
        _merges_behind_only(AllocatorModel._merge),
    ),
    "sizes rounded to 1024 B": (rules, "MIN_BLOCK_BYTES", 1024),
    "segments rounded to 4 MiB": (rules, "_ROUND_LARGE_BYTES", 4 * MIB),
    "a cache that keeps its segments": (AllocatorModel, "empty_cache", lambda model: None),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_another_rule_does_not_pass(name, monkeypatch):
    """A rule that could be changed unseen would not be shown by these traces."""
    traces = [trace(name) for name in ("cold-wsl-training", "growth-58gib-training", "cold-few")]
    owner, attribute, changed = MUTATIONS[name]
    monkeypatch.setattr(owner, attribute, changed)

    def is_same(only: Trace) -> bool:
        try:
            return replay(only).is_same
        except NotModelledError:  # not even the segments that are there at the start can be made
            return False

    assert not all(map(is_same, traces))


@pytest.fixture
def ran_out(tmp_path: Path) -> Path:
    """Write the snapshot of a run that ran out of memory, of which the first events are lost."""
    card = RecordedCard(384 * MIB, expandable_segments=True)
    held = [card.alloc(size) for size in (30 * MIB, 2 * MIB, 700 * KIB, 45 * MIB, 600 * KIB)]
    held += [card.alloc(512 * KIB) for _ in range(12)]
    early = len(card.events)
    for address in (held[0], held[2]):
        card.release(address)
    held += [card.alloc(25 * MIB), card.alloc(70 * MIB), card.alloc(900 * KIB)]
    for address in (held[1], held[3]):
        card.release(address)
    held.append(card.alloc(230 * MIB))  # only with what the cache gives back
    assert card.num_retries == 1
    with pytest.raises(AllocatorFull):
        card.alloc(300 * MIB)
    card.release(held[-1])
    card.alloc(12 * MIB)
    return card.dump(tmp_path / "snapshot.pickle", last=len(card.events) - early)


def test_a_run_that_ran_out_of_memory_is_repeated_from_its_middle_on(ran_out, tmp_path):
    (only,) = read(ran_out)
    assert only.expandable
    assert {piece[0] for segment in only.segments for piece in segment.pieces} >= {"used"}
    outcome = replay(only)
    assert outcome.first_difference is None
    assert sum(event.action == "oom" for event in only.events) == 1
    assert outcome.growths > 1
    assert outcome.is_same

    kept = tmp_path / "kept.json.gz"
    write(only, kept)
    events = [event._replace(stack=0, number=0, time_us=0) for event in only.events]  # not kept
    assert read(kept) == [only._replace(events=tuple(events))]


def test_the_command_says_what_differs_and_what_cannot_be_read(tmp_path, capsys):
    only = trace("cold-few")
    moved = [event._replace(address=event.address + 512) for event in only.events[-1:]]
    wrong = tmp_path / "wrong.json.gz"
    write(only._replace(events=(*only.events[:-1], *moved)), wrong)
    hostile = tmp_path / "hostile.pickle"
    hostile.write_bytes(pickle.dumps(print))
    bare = tmp_path / "bare.pickle"
    card = RecordedCard()
    card.alloc(MIB)
    bare.write_bytes(pickle.dumps(card.snapshot()["segments"], protocol=4))

    assert main([str(KEPT / "cold-few.json.gz")]) == 0
    assert "| 36 | 36 | 9 | 3606 |" in capsys.readouterr().out
    assert main([str(wrong), str(hostile), str(bare)]) == 1
    said = capsys.readouterr().err
    assert "STACK_GLOBAL" in said
    assert "recording was not on" in said


def test_an_outcome_that_counts_nothing_alike_is_not_the_same():
    assert Outcome().is_same
    assert not Outcome(peak_bytes=1).is_same
    assert not Outcome(first_difference="event 1: ...").is_same
