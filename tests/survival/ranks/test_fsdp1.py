"""FSDP1: whichever rank runs out of memory, the step has the gradient it would have had.

As test_fsdp2.py, launched with a file that says `fsdp_version: 1`.
"""

from typing import Any

import pytest

from tests import rounding
from tests.survival.failing import LEARNING_RATE, TERMS
from tests.survival.ranks.test_fsdp2 import (
    EXACT,
    IS_REFUSED,
    OTHER,
    as_launched,
    launched,
    print_sweep,
    survived_exactly,
)
from tests.wanted import wanted
from trainer_plugins.launch.configs import path

pytestmark = [pytest.mark.slow, pytest.mark.all]

# FSDP1 saves no full weights on the CPU (torch 2.13): its own state dict ends the process.
OF_BOTH = {name: case for name, case in EXACT.items() if name not in ("saved", "resumed")}
OF_TRL: dict[str, dict[str, Any]] = {}
if not IS_REFUSED:  # else that file is skipped, and this one with it
    from tests.survival.ranks import test_fsdp2_trl

    OF_TRL = {
        f"TRL, {name}": case
        for name, case in test_fsdp2_trl.EXACT.items()
        if ("sweep" not in case and name != "SFT, no accumulation")
        or name == "DPO with an adapter, swept"
    }
WINDOW = {"gradient_accumulation_steps": 3}
LATE_AND_EARLY = {"1": {"0": [0.6]}, "0": {"5": [0.3]}}
MORE: dict[str, dict[str, Any]] = {
    "one parameter a unit": {
        "fail": LATE_AND_EARLY,
        "settings": WINDOW,
        "orig_params": "false",
    },
    "prefetched before": {"fail": LATE_AND_EARLY, "settings": WINDOW, "prefetch": "BACKWARD_PRE"},
    "prefetched after": {"fail": LATE_AND_EARLY, "settings": WINDOW, "prefetch": "BACKWARD_POST"},
    "flat and gathered, swept": {
        "sweep": {"rank": 1, "micro_batch": 0},
        "settings": {"steps": 4},
        "orig_params": "false",
        "reshard_after_forward": "false",
    },
}
CASES = OF_BOTH | MORE | OF_TRL
OTHERS = {
    name: OTHER[name]
    for name in ("nothing fails", "in mixed precision", "rehearsed", "nothing helps")
}


@pytest.fixture(scope="module")
def two_ranks(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("fsdp1")
    first = path("fsdp2").read_text()
    for of_second, of_first in (
        ("fsdp_version: 2", "fsdp_version: 1"),
        ("fsdp_reshard_after_forward: true", "fsdp_sync_module_states: false"),  # not on the CPU
        ("fsdp_cpu_ram_efficient_loading: true", "fsdp_cpu_ram_efficient_loading: false"),
    ):
        assert of_second in first
        first = first.replace(of_second, of_first)
    config = folder / "fsdp1.yaml"
    config.write_text(first)
    return launched(folder, wanted(request, CASES | OTHERS), 2, config)


def as_first(facts: dict[str, Any]) -> None:
    as_launched(facts, 2, ("FullyShardedDataParallel",), 3)


@pytest.mark.parametrize("name", CASES)
def test_the_step_has_the_gradient_it_would_have_had(two_ranks, name: str, capsys) -> None:
    case = CASES[name]
    for seen in two_ranks:
        as_first(seen[name])
        assert seen[name]["num_gathers"] >= 6 or name != "TRL, DPO", "with TRL's second model"
    steps = case.get("settings", {}).get("steps", 2)
    of_trl = rounding.of_gradients(TERMS, [LEARNING_RATE] * steps)
    survived_exactly(two_ranks, name, case, of_trl if name in OF_TRL else 1e-12)
    print_sweep(capsys, f"FSDP1, {name}", case, two_ranks[0][name])


@pytest.mark.parametrize("name", ["nothing fails"])
def test_where_everything_fits_nothing_changes(two_ranks, name: str) -> None:
    for seen in two_ranks:
        facts = seen[name]
        assert (facts["gradients"], facts["weights"], facts["num_survived"]) == (0.0, 0.0, 0)
        assert facts["num_votes"] == 6 + 2


@pytest.mark.parametrize("name", ["rehearsed"])
def test_what_is_rehearsed_together_does_not_fail(two_ranks, name: str) -> None:
    for seen in two_ranks:
        as_first(seen[name])
        assert (seen[name]["num_survived"], seen[name]["limit"]) == (0, 4 * 16)
        assert seen[name]["gradients"] <= 1e-12


@pytest.mark.parametrize("name", ["in mixed precision"])
def test_gradients_reduced_in_another_precision(two_ranks, name: str) -> None:
    for seen in two_ranks:
        assert seen[name]["num_survived"] > 0
        assert seen[name]["gradients"] <= 1e-5


@pytest.mark.parametrize("name", ["nothing helps"])
def test_all_ranks_give_up_together(two_ranks, name: str) -> None:
    here, there = (seen[name]["ended"] for seen in reversed(two_ranks))
    assert "there is nothing smaller to try than 1 row" in here
    assert "another rank has nothing smaller to try" in there
