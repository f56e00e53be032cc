"""`plan -- COMMAND`: the user's own script, at full size, on torch's build for CUDA, without a card."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.distributed.launched import environment
from tests.drycuda.scripts import ROOT, TRAIN, WORKSPACES, left_running, place, plan_of, typed
from trainer_plugins.cli import app
from trainer_plugins.planner.plan import MemoryPlan
from trainer_plugins.units import MIB

FSDP = """
distributed_type: FSDP
num_processes: 2
mixed_precision: bf16
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer
  fsdp_state_dict_type: SHARDED_STATE_DICT
"""

pytestmark = [pytest.mark.slow, pytest.mark.all, pytest.mark.usefixtures("cuda_build")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return place(tmp_path_factory.mktemp("user"))


@pytest.fixture(scope="module")
def plan(cuda_build, folder: Path) -> MemoryPlan:
    words = ("--gpu", "80GiB", "--snapshot", "run.pickle", "--html", "page.html")
    return plan_of(folder, *words)


def test_the_script_is_planned_at_its_full_size(plan: MemoryPlan) -> None:
    sizes = (
        32000 * 1024 * 2,
        4 * (1024 * 1024 * 2 + 1024 * 512 * 2 + 3 * 1024 * 2816 + 2 * 1024),
        1024,
    )
    assert plan.num_parameters == plan.num_trainable_parameters == sum(sizes)
    assert plan.fits is True
    assert {"load", "forward", "backward", "optimizer step", "evaluation", "save"} <= set(
        plan.moments
    )
    assert sum(plan.breakdown.values()) == plan.allocated_peak_bytes <= plan.reserved_peak_bytes
    in_bf16 = 2 * plan.num_parameters
    assert plan.breakdown["weights"] == pytest.approx(in_bf16, rel=0.01)
    assert plan.breakdown["optimizer states"] == pytest.approx(2 * in_bf16, rel=0.05)
    assert plan.moment == "backward", "of the loss: there are no gradients yet"
    assert plan.moments["optimizer step"].allocated_bytes == pytest.approx(
        4 * in_bf16 + WORKSPACES["80GiB"], rel=0.03
    )
    assert any("train.py" in each.operation for each in plan.groups_at_peak)
    assert any("an evaluation of 32 of 512 rows" in line for line in plan.assumptions)
    assert plan.timeline[0][0] == "load"
    assert max(held for _, _, held in plan.timeline) == plan.reserved_peak_bytes


def test_the_planner_foretells_the_same(plan: MemoryPlan, folder: Path) -> None:
    """512 tokens are the longest row, and four of them a batch: the allocator gives the same bytes."""
    flags = ("--per_device_train_batch_size", "4", "--bf16", "True", "--dtype", "bfloat16")
    words = ["plan", "--model", str(folder / "model"), "--no-padding", "--json"]
    done = CliRunner().invoke(app, [*words, "--seq-length", "512", "--gpu", "80GiB", *flags])
    foretold = MemoryPlan.from_json(done.stdout)
    for moment in ("forward", "backward", "optimizer step"):
        assert plan.moments[moment].allocated_bytes == pytest.approx(
            foretold.moments[moment].allocated_bytes, abs=MIB
        ), moment


def test_nothing_of_the_users_is_touched(plan: MemoryPlan, folder: Path) -> None:
    names = {path.name for path in folder.iterdir()}
    assert {"model", "train.py", "run.pickle", "page.html"} <= names
    assert not {name for name in names if name in ("out", "runs") or "trainer-plugins-dry" in name}
    assert left_running(folder) == []


def test_its_snapshot_is_explained_and_its_page_is_drawn(plan: MemoryPlan, folder: Path) -> None:
    done = CliRunner().invoke(app, ["explain", str(folder / "run.pickle"), "--no-predict"])
    assert done.exit_code == 0, done.output
    assert 'data-chart="plan"' in (folder / "page.html").read_text()


def test_it_dies_on_one_mib_less_than_it_says_and_where_it_says(
    plan: MemoryPlan, folder: Path
) -> None:
    assert plan.smallest_card_bytes is not None
    assert plan.smallest_card_bytes < plan.nvidia_smi_peak_bytes
    enough = plan.smallest_card_bytes // MIB
    assert plan_of(folder, "--gpu", f"{enough}MiB,sm_90").fits is True
    below = plan_of(folder, "--gpu", f"{enough - 1}MiB,sm_90")
    assert below.fits is False
    assert below.failed_request_bytes
    assert below.failed_request == plan.fails_on_less
    # It is told what it would have needed.
    assert below.smallest_card_bytes == plan.smallest_card_bytes


def test_a_search_finds_the_most_rows_and_a_change_says_what_it_saves(folder: Path) -> None:
    accumulated = (*TRAIN, "2")
    done = typed(folder, "--gpu", "2300MiB", "--search", "--json", *accumulated)
    found = json.loads(done.stdout)
    assert [line["gradient_checkpointing"] for line in found["lines"]] == [False, True]
    rooms = [(line["micro_batch"], line["margin_bytes"]) for line in found["lines"]]
    assert (1, 0) < rooms[0] < rooms[1] < (8, 0)
    assert found["effective_batch"] == 8
    assert found["best"]["micro_batch"] == rooms[1][0]
    assert f"--per_device_train_batch_size {rooms[1][0]} " in found["best"]["flags"]
    changes = ("--explain-change", "checkpointing,lora")
    done = typed(folder, "--gpu", "80GiB", *changes, "--json", *TRAIN)
    checkpointing, lora = json.loads(done.stdout)["changes"]
    assert checkpointing["allocated_saved_bytes"] > 100 * MIB
    assert lora["reason"] == "your command sets this itself: change it there"


def test_two_ranks_have_a_card_each(plan: MemoryPlan, folder: Path) -> None:
    launcher = (sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2")
    command = ("--", *launcher, "train.py", "model", "out")
    both = plan_of(folder, "--gpu", "80GiB", "--num-gpus", "2", command=command)
    assert both.num_gpus == 2
    # DDP's buckets are as large as the gradients.
    more = both.moments["backward"].allocated_bytes - plan.moments["backward"].allocated_bytes
    assert more == pytest.approx(2 * plan.num_parameters, rel=0.15)


def test_rank_0_alone_needs_what_it_needs_beside_others(folder: Path) -> None:
    """FSDP asks the other ranks by NCCL and by gloo; a second process of each resumes."""
    (folder / "fsdp.yaml").write_text(FSDP)
    launcher = (sys.executable, "-m", "accelerate.commands.launch", "--config_file", "fsdp.yaml")
    command = ("--", *launcher, "train.py", "model", "out")
    cards = ("--gpu", "a100-80gb", "--num-gpus", "2")
    both = plan_of(folder, *cards, command=command)
    alone = plan_of(folder, *cards, "--alone", command=command)
    assert alone.num_gpus == both.num_gpus == 2
    assert alone.moments == both.moments
    # Half of the weights in fp32, and of the two states of AdamW, which torch holds twice there.
    assert both.moments["resume"].allocated_bytes >= (4 + 2 * 8) // 2 * both.num_parameters
    assert any("only rank 0 of 2 ran; " in line for line in alone.assumptions)
    assert alone.host_process_bytes_per_node == pytest.approx(
        both.host_process_bytes_per_node, rel=0.3
    )


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("raise SystemExit(4)", "exited with code 4 before a Trainer had trained"),
        ("print('all is well')", "exited with code 0 before a Trainer had trained"),
        ("input('which model? ')", "EOFError"),
        ("import no_such_module", "No module named 'no_such_module'"),
        (
            "import subprocess, sys\n"
            "subprocess.run([sys.executable, '-c', 'import time; time.sleep(1000)'])",
            "took more than 3 s",
        ),
        (
            "import os, subprocess, sys\n"
            "command = [sys.executable, '-c', 'import torch, time; time.sleep(1000)']\n"
            "subprocess.run(command, env={'PATH': os.environ['PATH']})",
            "without our environment",
        ),
        (
            "import subprocess, sys\n"
            "sys.exit(subprocess.run([sys.executable, '-I', '-c', 'import torch']).returncode)",
            "this Python reads no sitecustomize",
        ),
        (
            "import os; os.environ['CUDA_VISIBLE_DEVICES'] = '1'; import torch",
            "choice of devices, '1', hides every dry card",
        ),
    ],
)
def test_a_script_without_an_answer_is_said_and_leaves_nothing(
    tmp_path: Path, script: str, said: str
) -> None:
    place(tmp_path, script)
    done = typed(
        tmp_path, "--gpu", "24GiB", "--timeout", "3" if "sleep" in script else "100", *TRAIN
    )
    assert done.returncode == 2
    assert said in done.stderr
    assert not [*tmp_path.glob("trainer-plugins-dry-*")]
    assert left_running(tmp_path) == []


def test_a_signal_ends_all_of_it(tmp_path: Path) -> None:
    place(tmp_path, "import pathlib, time; pathlib.Path('began').touch(); time.sleep(1000)")
    plan = [sys.executable, "-m", "trainer_plugins", "plan", "--gpu", "24GiB"]
    command = [*plan, "--allow-writes", str(tmp_path), *TRAIN]  # `began` is seen from outside
    environ = {**environment(), "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    planning = subprocess.Popen(command, cwd=tmp_path, env=environ, stderr=subprocess.DEVNULL)
    while planning.poll() is None and not (tmp_path / "began").exists():
        time.sleep(0.1)
    planning.send_signal(signal.SIGTERM)
    assert planning.wait(60) == 130
    assert not [*tmp_path.glob("trainer-plugins-dry-*")]
    assert left_running(tmp_path) == []
