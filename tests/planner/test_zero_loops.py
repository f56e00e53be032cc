"""ZeRO-3 with LoRA: which weights are whole, call by call, in TRL's loops: on two real ranks, and in the planner."""

from pathlib import Path

import pytest

from tests.planner.several import IS_TOO_OLD, WHY_NOT, two_ranks_and_the_planner
from tests.planner.test_closed_loop_trl import HAS_HEAD
from tests.planner.zero_loops import CASES, NUM_STEPS, PLANNED, write_rows

SCRIPT = Path(__file__).with_name("zero_loops.py")
if IS_TOO_OLD:
    pytest.skip(WHY_NOT, allow_module_level=True)
pytestmark = [
    pytest.mark.all,
    pytest.mark.skipif(not HAS_HEAD, reason="this TRL has no head of its own"),
]

KEEPS = {"llama, dpo", "llama, dpo, checkpointing", "mixtral, dpo"}
"""The loops whose reference passes through the modules between the policy's two passes."""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """What both ranks and the planner noted, by the name of the case."""
    folder = tmp_path_factory.mktemp("loops")
    write_rows(folder)
    return two_ranks_and_the_planner(SCRIPT, folder)


@pytest.mark.parametrize("name", PLANNED)
def test_the_same_weights_are_whole_after_each_call(outcomes, name):
    first, second, planner = (each[name] for each in outcomes)
    for facts in (first, second, planner):
        assert (facts["world_size"], facts["num_steps"], facts["stage"]) == (2, NUM_STEPS, 3)
    assert len(first["calls"]) > 500
    assert first["calls"] == second["calls"]
    assert planner["calls"] == first["calls"]


@pytest.mark.parametrize("name", CASES)
def test_only_a_reference_between_forward_and_backward_keeps_them(outcomes, name):
    calls, numel = outcomes[0][name]["calls"], outcomes[0][name]["numel"]
    most = max(whole for _, whole in calls) / numel
    assert most > 0.8 if name in KEEPS else most < (0.3 if name in PLANNED else 0.6)


@pytest.mark.parametrize("name", PLANNED)
def test_all_are_released_at_the_end_of_each_backward_pass(outcomes, name):
    calls = outcomes[0][name]["calls"]
    assert [whole for call, whole in calls if call == "backward_epilogue"] == [0] * NUM_STEPS
