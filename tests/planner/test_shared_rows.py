"""Context parallelism: cards that share each row take of simulated cards what is planned."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import processes
from tests.distributed.launched import command, ended, environment, start
from tests.planner.context_ranks import ALONE, CASES, LAUNCHES, LENGTH
from tests.planner.several import IS_TOO_OLD, WHY_NOT
from tests.planner.test_hsdp import file_of
from tests.planner.test_plans import request, tiny
from tests.processes import ENDS_A_HANG
from trainer_plugins import MemoryPlan
from trainer_plugins.launch.configs import path
from trainer_plugins.planner import NotPredicted, PlanError
from trainer_plugins.planner.run import predict_all
from trainer_plugins.testing import simgpu

SCRIPT = Path(__file__).with_name("context_ranks.py")
pytestmark = pytest.mark.skipif(IS_TOO_OLD, reason=WHY_NOT)
ALL_CASES = [(launch, name) for launch, (_, names) in LAUNCHES.items() for name in names]


def num_cards(launch: str) -> int:
    sizes = LAUNCHES[launch][0]
    return int(sizes["cp_size"] * sizes.get("dp_shard_size", 1))


@pytest.fixture(scope="module")
def both(tmp_path_factory) -> tuple[dict[str, list[Any]], dict[str, Any]]:
    """For each launch what its ranks took and learned, and the plans of its cases."""
    if (reason := simgpu.unavailable_reason()) is not None:
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("context")
    ranks = {}
    for launch, (sizes, _) in LAUNCHES.items():
        number = num_cards(launch)
        file = file_of(folder, number, **sizes).rename(folder / f"{launch}.yaml")
        call = [*command(file, ("--num_processes", str(number)), SCRIPT), "ranks"]
        log = folder / f"log {launch}"
        printed = ended(start([*call, folder, launch], log, CUDA_VISIBLE_DEVICES=""), log)
        files = [folder / f"{launch}-{rank}.json" for rank in range(number)]
        assert all(file.is_file() for file in files), printed[-5000:]
        ranks[launch] = [json.loads(file.read_text()) for file in files]
    for mode in (("ranks", str(folder), ALONE), ("planner", str(folder))):
        done = processes.run([sys.executable, SCRIPT, *mode], environ=environment())
        assert done.returncode == 0, done.stderr[-3000:]
    ranks[ALONE] = [json.loads((folder / f"{ALONE}-0.json").read_text())]
    return ranks, json.loads((folder / "planner.json").read_text())


@pytest.mark.parametrize(("launch", "name"), ALL_CASES)
def test_the_first_card_holds_what_is_planned_and_the_most(both, launch, name):
    """What is planned is within 0.3 %; of the runs without checkpointing and evaluation, 32 B."""
    ranks, plans = both
    first, *others = (rank[name] for rank in ranks[launch])
    assert (first["device"], first["wrapped"][:4]) == ("simgpu:0", "FSDP")
    planned = plans[launch][name]
    assert planned["card"] == pytest.approx(first["card"], rel=0.003)
    assert all(first["card"] >= other["card"] for other in others)
    assert planned["plan"]["num_gpus"] == num_cards(launch)


def test_cards_that_share_a_row_learn_what_a_card_alone_learns(both):
    """So the ring computes, and what was measured is what it needs. In bf16."""
    ranks, _ = both
    alone, shared = (ranks[launch][0]["bf16"]["learned"] for launch in (ALONE, "two cards"))
    assert shared == pytest.approx(alone, rel=0.01)
