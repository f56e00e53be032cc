"""Cards that share each row (context and sequence parallelism) hold what is planned."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import processes
from tests.distributed.launched import command, ended, environment, start
from tests.planner.several import IS_TOO_OLD, WHY_NOT
from tests.planner.shared_rows import ALONE, LAUNCHES, all_cases
from tests.planner.test_plans import request, tiny
from tests.processes import ENDS_A_HANG
from tests.wanted import write_wanted
from trainer_plugins import MemoryPlan
from trainer_plugins.launch.configs import path
from trainer_plugins.planner import NotPredicted, PlanError
from trainer_plugins.planner.predict import predict_all
from trainer_plugins.testing import simgpu

SCRIPT = Path(__file__).with_name("shared_rows.py")
ALWAYS = {("context", "bf16")}
MOST = "50000000"
"""Elements of a bucket in the shipped files, which are more than a small model has."""

pytestmark = [pytest.mark.all, pytest.mark.skipif(IS_TOO_OLD, reason=WHY_NOT)]


def file_of(folder: Path, name: str, shipped: str, **sizes: Any) -> Path:
    """A shipped launch file, with small buckets and accelerate's sizes of the groups of cards."""
    content = yaml.safe_load(path(shipped).read_text().replace(MOST, MOST[:-2]))
    content["num_processes"] = num_cards(sizes)
    content["parallelism_config"] = {f"parallelism_config_{k}": v for k, v in sizes.items()}
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(content))
    return file


def num_cards(sizes: dict[str, Any]) -> int:
    divided = (sizes.get(f"{name}_size", 1) for name in ("cp", "sp", "dp_shard", "tp"))
    number = 1
    for size in divided:
        number *= size
    return number


@pytest.fixture(scope="module")
def both(request, tmp_path_factory) -> tuple[dict[str, list[Any]], dict[str, Any]]:
    """For each launch what its ranks took and learned, and the plans of its cases."""
    if (reason := simgpu.unavailable_reason()) is not None:
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("rows")
    ranks = {}
    cases = {f"{launch}-{name}": (launch, name) for launch, name in all_cases()}
    names = {
        item.callspec.id
        for item in request.session.items
        if item.path == request.path and hasattr(item, "callspec")
    }
    asked = {cases[name] for name in cases if name in names} | ALWAYS
    write_wanted(folder, sorted(asked))
    for launch in sorted({launch for launch, _ in asked}):
        shipped, sizes, _ = LAUNCHES[launch]
        number = num_cards(sizes)
        file = file_of(folder, launch, shipped, **sizes)
        call = [*command(file, ("--num_processes", str(number)), SCRIPT), "ranks"]
        log = folder / f"log {launch}"
        printed = ended(start([*call, folder, launch], log, CUDA_VISIBLE_DEVICES=""), log)
        files = [folder / f"{launch}-{rank}.json" for rank in range(number)]
        assert all(file.is_file() for file in files), printed[-5000:]
        ranks[launch] = [json.loads(file.read_text()) for file in files]
    environ = environment(CUDA_VISIBLE_DEVICES="")
    for mode in (("ranks", str(folder), ALONE), ("planner", str(folder))):
        done = processes.run([sys.executable, SCRIPT, *mode], environ=environ)
        assert done.returncode == 0, done.stderr[-3000:]
    ranks[ALONE] = [json.loads((folder / f"{ALONE}-0.json").read_text())]
    return ranks, json.loads((folder / "planner.json").read_text())


@pytest.mark.all
@pytest.mark.slow
@pytest.mark.parametrize(("launch", "name"), all_cases())
def test_the_first_card_holds_what_is_planned_and_none_holds_more(both, launch, name):
    """All but the runs with checkpointing and evaluation agree to 32 B."""
    ranks, plans = both
    first, *others = (rank[name] for rank in ranks[launch])
    wrapped = "DeepSpeedEngine" if launch.startswith("sequence") else "FSDPLlamaForCausalLM"
    assert first["device"] == "simgpu:0"
    assert first["wrapped"] == wrapped or name == "LoRA"
    planned = plans[launch][name]
    assert planned["card"] == pytest.approx(first["card"], rel=0.003)
    assert all(first["card"] >= other["card"] for other in others)
    assert planned["plan"]["num_gpus"] == num_cards(LAUNCHES[launch][1])


@pytest.mark.all
@pytest.mark.slow
@pytest.mark.parametrize(
    ("launch", "what", "within"),
    [("context", "norms", 0.002), ("sequence, ZeRO-2", "losses", 0.0001)],
)
def test_cards_that_share_a_row_compute_what_a_card_alone_computes(both, launch, what, within):
    """So the attention that was measured was that of whole rows.

    FSDP2 rounds the loss to bf16, and DeepSpeed's norm is twice as large.
    """
    ranks, _ = both
    alone, shared = (ranks[each][0]["bf16"] for each in (ALONE, launch))
    assert shared[what] == pytest.approx(alone[what], rel=within)
    assert shared["card"] < alone["card"]


@pytest.fixture(scope="module")
def planned(tmp_path_factory) -> dict[str, MemoryPlan | PlanError]:
    folder = tmp_path_factory.mktemp("files")
    context = file_of(folder, "context", "fsdp2", cp_size=2)
    sequence = file_of(folder, "sequence", "zero3", sp_size=2)
    files = {
        "context": (context, 2048),
        "odd": (context, 2046),
        "data": (file_of(folder, "data", "fsdp2", dp_shard_size=2), 2048),
        "context, DDP": (file_of(folder, "ddp", "ddp", cp_size=2), 2048),
        "context, ZeRO": (file_of(folder, "zero", "zero3", cp_size=2), 2048),
        "sequence": (sequence, 2048),
        "sequence, FSDP2": (file_of(folder, "fsdp", "fsdp2", sp_size=2), 2048),
        "tensor": (file_of(folder, "tensor", "fsdp2", dp_shard_size=2, tp_size=2), 2048),
        "after": (path("zero3"), 2048),
    }
    wide = tiny(vocab_size=4096, max_position_embeddings=2048)
    asked = [
        replace(
            request(wide, "--bf16", "True", num_gpus=2, sequence_length=length),
            launch_file=str(file),
            num_gpus=4 if name == "tensor" else 2,
        )
        for name, (file, length) in files.items()
    ]
    return dict(zip(files, predict_all(asked, ENDS_A_HANG), strict=True))


def plan_of(planned: dict[str, MemoryPlan | PlanError], name: str) -> MemoryPlan:
    plan = planned[name]
    assert isinstance(plan, MemoryPlan), plan
    return plan


def test_two_cards_that_share_a_row_have_half_of_its_logits(planned) -> None:
    whole, half = plan_of(planned, "data"), plan_of(planned, "context")
    of_half, of_whole = (plan.breakdown["logits and loss"] for plan in (half, whole))
    assert of_half == pytest.approx(of_whole / 2, rel=0.01)
    assert half.planned["rows"] == "1 at once x 1 x 2 GPU (2 share a row), 1 a step"
    assert whole.planned["rows"] == "1 at once x 1 x 2 GPU, 2 a step"
    assert any("context parallelism" in line for line in half.not_reliable)
    assert not any("context parallelism" in line for line in whole.not_reliable)


def test_cards_that_share_rows_evaluate_as_many_batches_as_others(tmp_path) -> None:
    """Each has half of the logits of each batch, and metrics keep them all."""
    flags = ("--bf16", "True", "--eval_strategy", "epoch")
    asked = request(tiny(vocab_size=4096), *flags, has_metrics=True, num_evaluation_batches=4)
    files = (
        file_of(tmp_path, "rows", "fsdp2", cp_size=2),
        file_of(tmp_path, "data", "fsdp2", dp_shard_size=2),
    )
    runs = [replace(asked, launch_file=str(file), num_gpus=2) for file in files]
    rows, data = predict_all(runs, ENDS_A_HANG)
    assert isinstance(rows, MemoryPlan), rows
    assert isinstance(data, MemoryPlan), data
    half, whole = (plan.moments["evaluation"].allocated_bytes for plan in (rows, data))
    assert half == pytest.approx(whole / 2, rel=0.05)


def test_a_plan_says_what_deepspeed_asks_of_a_collator(planned) -> None:
    plan = plan_of(planned, "sequence")
    assert any("position_ids" in line for line in plan.assumptions)
    assert any("sequence parallelism" in line for line in plan.not_reliable)


def test_nothing_of_a_shared_row_is_left_for_the_next_plan(planned) -> None:
    plan = plan_of(planned, "after")
    assert "share" not in plan.planned["rows"]


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("odd", "rows of 2046 tokens, which are not 4 equal parts: pad them"),
        ("context, DDP", "context parallelism (cp_size) without FSDP2"),
        ("context, ZeRO", "context parallelism (cp_size) without FSDP2"),
        ("sequence, FSDP2", "sequence parallelism (sp_size) without DeepSpeed"),
        ("tensor", "tensor parallelism (tp_size 2 in tensor.yaml) with dp_shard_size 2"),
    ],
)
def test_what_is_not_planned_is_refused_by_name(planned, name: str, line: str) -> None:
    assert isinstance(planned[name], NotPredicted), planned[name]
    assert line in str(planned[name])
