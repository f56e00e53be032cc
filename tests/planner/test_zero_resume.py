"""ZeRO: a resumption takes of two simulated cards, and of main memory, what the plan says, byte by byte."""

from pathlib import Path

import pytest

from tests.planner.several import IS_TOO_OLD, WHY_NOT, two_ranks_and_the_planner
from tests.planner.zero_resumed import CASES, REFUSED
from trainer_plugins.testing import simgpu

pytestmark = pytest.mark.all

SCRIPT = Path(__file__).with_name("zero_resumed.py")
if IS_TOO_OLD:
    pytest.skip(WHY_NOT, allow_module_level=True)

SMALL_TENSORS = 64
"""Bytes of a scale, a norm and a step, which one has on the card and the other on the host."""

MIB = 1 << 20
OF_PYTHON = 4 * MIB
"""What a load takes besides tensors: modules that it imports, and pages that malloc keeps."""


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """What two ranks took, and what the planner says, by the name of the case."""
    if (reason := simgpu.unavailable_reason()) is not None:
        pytest.skip(reason)
    given_back = {"MALLOC_MMAP_THRESHOLD_": "65536"}  # the kernel gets back what is freed
    *ranks, plans = two_ranks_and_the_planner(SCRIPT, tmp_path_factory.mktemp("zero"), **given_back)
    return ranks, plans


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_resume_on_cards_of_their_own(both, name):
    for rank in both[0]:
        facts = rank[name]
        assert (facts["world_size"], facts["num_steps"]) == (2, 2)
        assert (facts["stage"], facts["device"]) == (CASES[name]["stage"], "simgpu:0")


@pytest.mark.parametrize("name", CASES)
def test_a_card_holds_what_is_planned(both, name):
    ranks, plans = both
    for rank in ranks:
        assert plans[name]["card"] == pytest.approx(rank[name]["card"], abs=SMALL_TENSORS)
    plan = plans[name]["plan"]
    assert plan["moments"]["resume"]["allocated_bytes"] >= plans[name]["card"]
    assert not any("resum" in line for line in plan["not_predicted"])


@pytest.mark.parametrize("name", CASES)
def test_main_memory_holds_what_is_planned(both, name):
    """Ranks may read at the same time, unless each waits for the one before."""
    ranks, plans = both
    peak = (
        at_once([rank[name]["host_changes"] for rank in ranks])
        if "in turn" in name
        else sum(rank[name]["host"] for rank in ranks)
    )
    assert plans[name]["host"]["resume"] == pytest.approx(peak, abs=SMALL_TENSORS)
    assert plans[name]["plan"]["host_ram_bytes_per_node"] >= plans[name]["host"]["resume"]


def at_once(ranks):
    """The highest sum of what several ranks hold at one time."""
    now = [changes[0][1] for changes in ranks]
    peak = sum(now)
    for _, rank, num_bytes in sorted(
        (when, rank, num_bytes) for rank, all_of in enumerate(ranks) for when, num_bytes in all_of
    ):
        now[rank] = num_bytes
        peak = max(peak, sum(now))
    return peak


@pytest.mark.parametrize("name", CASES)
def test_the_kernel_tells_the_same_of_main_memory(both, name):
    """Simulated cards are part of it; no tensor of torch's own is missed in what was counted."""
    for rank in both[0]:
        facts = rank[name]
        assert facts["kernel"] == pytest.approx(facts["tensors"], abs=OF_PYTHON)
    if "LoRA" not in name:
        assert facts["tensors"] > 8 * OF_PYTHON


def test_reading_in_turn_saves_the_file_of_every_other_rank(both):
    """A file holds a master weight and two states, of 4 bytes each, of every second parameter."""
    _, plans = both
    together, in_turn = plans["3, offloaded"], plans["3, offloaded, in turn"]
    masters = 4 * together["plan"]["num_parameters"] / 2
    assert together["host"]["resume"] - in_turn["host"]["resume"] == pytest.approx(
        masters, rel=0.01
    )


def test_with_elastic_checkpoint_each_rank_reads_the_files_of_all(both):
    """And joins what is in them: DeepSpeed#1111."""
    _, plans = both
    own, all_files = plans["fused"], plans["elastic, fused"]
    file = 12 * own["plan"]["num_parameters"] / 2
    assert own["host"]["resume"] == pytest.approx(2 * file, rel=0.01)
    assert all_files["host"]["resume"] > 2 * 2 * file


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_planned_is_left_out_by_name(both, name):
    plan = both[1][name]["plan"]
    assert "resume" not in plan["moments"]
    assert sum("resuming" in line for line in plan["not_predicted"]) == 1
