"""FSDP1: what real ranks take of their simulated cards, against the plan of the same run."""

import json
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import processes
from tests.distributed.launched import free_port, start
from tests.models import tiny_llama
from tests.planner.fsdp1_ranks import CASES, CONFIG
from tests.planner.several import IS_TOO_OLD, WHY_NOT
from tests.processes import ENDS_A_HANG
from trainer_plugins import MemoryPlan
from trainer_plugins.planner import PlanError
from trainer_plugins.planner.plan import Moment
from trainer_plugins.planner.predict import predict_all
from trainer_plugins.planner.request import PlanRequest
from trainer_plugins.testing import simgpu
from trainer_plugins.units import GIB

pytestmark = pytest.mark.all

SCRIPT = Path(__file__).with_name("fsdp1_ranks.py")
HYBRID = [name for name in CASES if name.startswith("hybrid")]
DIVIDED_BY_ALL = [name for name in CASES if name not in HYBRID]
RESUMED = [name for name in CASES if "save_steps" in CASES[name]]
OF_TRAINING: tuple[Moment, ...] = ("forward", "backward", "optimizer step")
STRATEGIES = {
    "full shard": "FULL_SHARD",
    "grad op": "SHARD_GRAD_OP",
    "no shard": "NO_SHARD",
    "hybrid": "HYBRID_SHARD",
}

if IS_TOO_OLD:
    pytest.skip(WHY_NOT, allow_module_level=True)


@pytest.fixture(scope="module")
def both(tmp_path_factory) -> tuple[dict[str, list[dict[str, Any]]], dict[str, MemoryPlan]]:
    """What each rank took, and the plan, by the name of the case.

    Three ranks share what three cannot divide; of hybrid sharding, two machines have two ranks.
    """
    if (reason := simgpu.unavailable_reason()) is not None:
        pytest.skip(reason)
    facts: dict[str, list[dict[str, Any]]] = {}
    requests: dict[str, PlanRequest] = {}
    for names, num_ranks, num_local in ((DIVIDED_BY_ALL, 3, 3), (HYBRID, 4, 2)):
        folder = tmp_path_factory.mktemp("ranks")
        ranks = launched(folder, names, num_ranks, num_local)
        facts |= {name: [rank[name] for rank in ranks] for name in names}
        requests |= pickle.loads((folder / "requests").read_bytes())
    plans = predict_all([*requests.values()], ENDS_A_HANG)
    return facts, {name: plan_from(each) for name, each in zip(requests, plans, strict=True)}


def plan_from(outcome: MemoryPlan | PlanError) -> MemoryPlan:
    assert isinstance(outcome, MemoryPlan), outcome
    return outcome


def launched(folder: Path, names: list[str], num_ranks: int, num_local: int) -> list[Any]:
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    sizes = {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_local)}
    call: list[str | Path] = [sys.executable, SCRIPT, folder, *names]
    ranks = [
        start(
            call,
            folder / f"log-{rank}",
            RANK=str(rank),
            LOCAL_RANK=str(rank % num_local),
            GROUP_RANK=str(rank // num_local),
            **address,
            **sizes,
        )
        for rank in range(num_ranks)
    ]
    processes.end(*ranks)
    printed = (folder / "log-0" / "printed.txt").read_text()
    assert (folder / "requests").is_file(), printed[-5000:]
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(num_ranks)]


@pytest.mark.parametrize("name", CASES)
def test_ranks_trained_under_fsdp1_on_cards_of_their_own(both, name):
    for facts in both[0][name]:
        assert (facts["wrapped"], facts["device"]) == ("FullyShardedDataParallel", "simgpu:0")
        assert facts["strategy"] == STRATEGIES[name.partition(",")[0]]
        assert facts["world_size"] == both[1][name].num_gpus == (4 if name in HYBRID else 3)
        assert facts["num_steps"] == (4 if name in RESUMED else 3)


@pytest.mark.parametrize("name", ["full shard", "full shard, LoRA"])
def test_a_plan_names_what_was_wrapped(both, name):
    plan = both[1][name]
    assert plan.planned["model"] == "LlamaForCausalLM"
    assert plan.planned["adapter"] == ("LORA, r=4" if "LoRA" in name else "none")
    assert plan.planned["strategy"] == "FSDP1"
    assert not [group.part for group in plan.groups_at_peak if group.part.startswith("_")]
    whole = sum(each.numel() for each in tiny_llama(**CONFIG).parameters())
    assert (
        plan.num_parameters == whole or plan.num_trainable_parameters < whole < plan.num_parameters
    )


@pytest.mark.parametrize("name", CASES)
def test_a_rank_holds_what_is_planned(both, name):
    first, plan = both[0][name][0], both[1][name]
    trained = max(plan.moments[moment].allocated_bytes for moment in OF_TRAINING)
    assert trained == pytest.approx(first["train"], rel=0.002)
    assert plan.moments["load"].allocated_bytes == pytest.approx(first["load"], rel=0.002)
    reserved = max(
        peak.reserved_bytes for moment, peak in plan.moments.items() if moment != "resume"
    )
    assert reserved == pytest.approx(first["reserved"], rel=0.01)


@pytest.mark.parametrize("name", RESUMED)
@pytest.mark.parametrize("moment", ["save", "resume"])
def test_a_checkpoint_takes_what_is_planned(both, name, moment):
    planned = both[1][name].moments[moment].allocated_bytes
    assert planned == pytest.approx(both[0][name][0][moment], rel=0.002)


def test_a_published_run_on_eight_cards_took_what_is_planned():
    """Llama 7B on eight H100: torchtitan#165. Active memory includes what other streams may read."""
    row = "torchtitan#165: FSDP1, AC"
    command = [sys.executable, "-m", "benchmarks.several", "--answer", row, ""]
    done = processes.run(command)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.strip().splitlines()[-1])

    assert found["allocated"] / GIB == pytest.approx(23.579, rel=0.001)
    assert found["reserved"] / GIB == pytest.approx(32.142, rel=0.001)
