"""Cards that share the tensors of a model (tensor parallelism) hold what is planned."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import processes
from tests.distributed.launched import command, ended, environment, start
from tests.planner.several import IS_TOO_OLD, WHY_NOT
from tests.planner.tensor_ranks import CASES, EVERYWHERE
from tests.planner.test_shared_rows import file_of
from tests.wanted import wanted, write_wanted
from trainer_plugins.testing import simgpu

pytest.importorskip("transformers.distributed.mixin", reason="it divides no models that are made")
pytestmark = [
    pytest.mark.skipif(IS_TOO_OLD, reason=WHY_NOT),
    pytest.mark.slow,
]
SCRIPT = Path(__file__).with_name("tensor_ranks.py")


@pytest.fixture(scope="module")
def both(request, tmp_path_factory) -> tuple[list[Any], dict[str, Any]]:
    """What each rank took and learned, and the plans of the same cases."""
    if (reason := simgpu.unavailable_reason()) is not None:
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("tensors")
    write_wanted(folder, wanted(request, CASES, also=["bf16"]))
    file = file_of(folder, "tensor", "ddp", tp_size=2)
    log = folder / "log"
    call = [*command(file, (), SCRIPT), "ranks", folder]
    printed = ended(start(call, log, CUDA_VISIBLE_DEVICES=""), log)
    files = [folder / f"{rank}.json" for rank in range(2)]
    assert all(file.is_file() for file in files), printed[-5000:]
    done = processes.run(
        [sys.executable, SCRIPT, "planner", str(folder)],
        environ=environment(CUDA_VISIBLE_DEVICES=""),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    ranks = [json.loads(file.read_text()) for file in files]
    return ranks, json.loads((folder / "planner.json").read_text())


@pytest.mark.all
@pytest.mark.parametrize("name", CASES)
def test_the_first_card_holds_what_is_planned_and_the_other_no_more(both, name: str) -> None:
    """All but the run with checkpointing agree to 400 B."""
    ranks, plans = both
    first, other = (rank[name] for rank in ranks)
    assert first["device"] == "simgpu:0"
    assert plans[name]["card"] == pytest.approx(first["card"], rel=0.01)
    assert first["card"] >= other["card"]
    assert first["losses"] == other["losses"]


@pytest.mark.all
def test_the_plan_says_who_divides_the_model_and_that_all_cards_share_their_rows(both) -> None:
    plan = both[1]["bf16"]["plan"]
    assert any("DistributedConfig(tp_size=2" in line for line in plan["assumptions"])
    assert any("tensor parallelism" in line for line in plan["not_reliable"])
    assert plan["planned"]["rows"] == "1 at once x 1 x 2 GPU (2 share a row), 1 a step"
    assert plan["planned"]["strategy"] == "tensor parallelism"


@pytest.mark.all
def test_saving_takes_no_more_and_tied_weights_are_divided_once(both) -> None:
    plans = both[1]
    alone, saved, tied = (plans[name]["plan"] for name in ("evaluation", "saved", "tied"))
    assert saved["allocated_peak_bytes"] == alone["allocated_peak_bytes"]
    assert tied["num_parameters"] < plans["bf16"]["plan"]["num_parameters"]


@pytest.mark.all
def test_adapters_that_peft_makes_for_a_part_of_their_input_are_refused(both) -> None:
    """A real run fails there with `shape '[512, 64]' is invalid for input of size 65536`."""
    assert "o_proj" in both[1][EVERYWHERE]["error"]
