"""Two groups of two cards, each with the whole model (HSDP), against four real ranks on the CPU."""

import json
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import processes
from tests.distributed.launched import ROOT, command, ended, environment, start
from tests.planner.several import IS_TOO_OLD, WHY_NOT
from tests.planner.test_plans import CHECKPOINTING, request
from tests.processes import ENDS_A_HANG
from trainer_plugins import MemoryPlan
from trainer_plugins.launch.configs import path
from trainer_plugins.planner.predict import predict_all

pytestmark = [pytest.mark.all, pytest.mark.skipif(IS_TOO_OLD, reason=WHY_NOT)]


def file_of(folder: Path, num_gpus: int, **sizes: int) -> Path:
    """The shipped launch file of FSDP2 for so many cards, and accelerate's sizes of its groups."""
    content = yaml.safe_load(path("fsdp2").read_text()) | {"num_processes": num_gpus}
    if sizes:
        named = {f"parallelism_config_{name}": size for name, size in sizes.items()}
        content["parallelism_config"] = named
    named_after = "-".join(f"{name}{size}" for name, size in sizes.items())
    file = folder / f"{num_gpus}-{named_after}.yaml"
    file.write_text(yaml.safe_dump(content))
    return file


@pytest.fixture(scope="module")
def real(tmp_path_factory) -> tuple[dict[str, Any], dict[str, Any], Counter[tuple[str, int]]]:
    """What four ranks made and sent, the plan of the same run, and what was made in the plan."""
    folder = tmp_path_factory.mktemp("ranks")
    file = file_of(folder, 4, dp_replicate_size=2, dp_shard_size=2)
    script = Path(__file__).parent / "real_ranks.py"
    call = [*command(file, ("--num_processes", "4"), script), str(folder)]
    printed = ended(start(call, folder, CUDA_VISIBLE_DEVICES=""), folder)
    assert (folder / "rank-0.json").is_file(), printed[-5000:]
    facts = json.loads((folder / "rank-0.json").read_text())["hsdp"]
    results = folder / "results"
    call = [sys.executable, "-m", "tests.planner.traced", str(folder / "requests"), str(results)]
    done = processes.run(call, cwd=ROOT, environ=environment())
    assert done.returncode == 0, done.stderr
    (made,) = json.loads((folder / "results.seen").read_text())
    seen = Counter((kind, size) for kind, _, size in made)
    return facts, json.loads(results.read_text())[0]["plan"], seen


def test_a_rank_gathers_and_reduces_within_its_group_as_real_ones_do(real) -> None:
    facts, plan, made = real

    assert (facts["wrapped"], facts["world_size"], facts["backend"]) == (
        "FSDPLlamaForCausalLM",
        4,
        "gloo",
    )
    buffers = Counter({size: n for (kind, size), n in made.items() if kind == "sharding buffers"})
    sent = Counter(facts["gathered"]) + Counter(facts["unsharded"]) + Counter(facts["reduced"])
    assert buffers == sent
    assert plan["num_gpus"] == 4
    assert plan["breakdown"]["weights"] == facts["weights"]
    assert plan["breakdown"]["optimizer states"] == facts["states"] + 512 * 30


@pytest.fixture(scope="module")
def planned(tmp_path_factory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("files")
    files = {
        "4": file_of(folder, 4),
        "8": file_of(folder, 8),
        "2 x 4": file_of(folder, 8, dp_replicate_size=2, dp_shard_size=4),
    }
    asked = [
        replace(request("llama-3.2-1b", *CHECKPOINTING, num_gpus=0), launch_file=str(file))
        for file in files.values()
    ]
    return dict(zip(files, predict_all(asked, ENDS_A_HANG), strict=True))


def test_two_groups_of_four_hold_what_four_cards_hold(planned) -> None:
    four, both, eight = (planned[name] for name in ("4", "2 x 4", "8"))

    assert isinstance(both, MemoryPlan), both
    assert (both.num_gpus, four.num_gpus) == (8, 4)
    for part in ("weights", "optimizer states"):
        assert both.breakdown[part] == four.breakdown[part]
    assert both.breakdown["weights"] > 1.9 * eight.breakdown["weights"]
    # the reductions between the groups have a stream, and so a pool, of their own
    assert both.reserved_peak_bytes >= four.reserved_peak_bytes
