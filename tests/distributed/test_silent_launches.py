"""Twelve launches that end with exit code 0 and train something else than was asked: each is said at train begin."""

import os
from ctypes.util import find_library
from pathlib import Path

import accelerate
import pytest
from packaging.version import Version

from tests.distributed.launched import LOOKED_AT, Launched, launch
from trainer_plugins import checkpointing
from trainer_plugins.finding import Severity
from trainer_plugins.launch.configs import copy, read

pytestmark = pytest.mark.all

ONE_STEP = ("--max_steps", "1")


def changed(folder: Path, name: str, old: str, new: str) -> Path:
    """A copy of a shipped file with one thing changed."""
    text = read(name)
    assert old in text
    folder.mkdir(exist_ok=True)
    file = folder / f"{name}.yaml"
    file.write_text(text.replace(old, new))
    return file


def only_finding(ran: Launched, code: str) -> str:
    """The text of the finding that was expected, after a look that there is no other about the launch."""
    about = {c: f for c, f in ran.findings.items() if "-not-" in c}
    assert list(about) == [code], about
    assert f"[{code}]" in ran.text  # it was logged, too
    return str(about[code])


def test_a_model_below_the_persistence_threshold_is_divided_nowhere(tmp_path: Path) -> None:
    ran = launch(tmp_path, "zero3", *ONE_STEP, "--hidden_size", "64")

    assert ran.strategies[0].num_partitioned == 0
    assert "0 of" in only_finding(ran, "parameters-not-partitioned")


def test_accelerate_use_cpu_turns_deepspeed_off(tmp_path: Path) -> None:
    ran = launch(tmp_path, "zero3", *ONE_STEP, use_cpu=False, ACCELERATE_USE_CPU="true")

    assert {s.wrapped_class for s in ran.strategies} == {"DistributedDataParallel"}
    assert "Unset ACCELERATE_USE_CPU" in only_finding(ran, "strategy-not-in-force")


def test_an_accelerator_of_the_script_turns_deepspeed_off(tmp_path: Path) -> None:
    script = Path(__file__).with_name("own_accelerator.py")
    ran = launch(tmp_path, "zero3", *ONE_STEP, script=script)

    assert "that the script created" in only_finding(ran, "strategy-not-in-force")


@pytest.mark.all
def test_multi_cpu_starts_one_process(tmp_path: Path) -> None:
    file = changed(tmp_path, "ddp", "distributed_type: MULTI_GPU", "distributed_type: MULTI_CPU")
    ran = launch(tmp_path, file, *ONE_STEP, fresh=LOOKED_AT)

    assert [s.world_size for s in ran.strategies] == [1]
    assert "MULTI_GPU" in only_finding(ran, "world-size-not-in-force")


def test_the_flag_cpu_starts_one_process(tmp_path: Path) -> None:
    ran = launch(tmp_path, "zero3", *ONE_STEP, flags=("--cpu",), fresh=LOOKED_AT)

    assert [s.world_size for s in ran.strategies] == [1]
    assert "starts one process because of --cpu" in only_finding(ran, "world-size-not-in-force")


def test_fsdp_on_the_cpu_is_ddp(tmp_path: Path) -> None:
    ran = launch(tmp_path, "fsdp2", *ONE_STEP)

    assert [s.family for s in ran.strategies] == ["DDP", "DDP"]
    assert "FSDP only on accelerators" in only_finding(ran, "strategy-not-in-force")


@pytest.mark.skipif(
    Version(accelerate.__version__) < Version("1.11"),
    reason="accelerate 1.10 makes a group of them all the same",
)
def test_without_a_device_each_process_trains_alone(tmp_path: Path) -> None:
    ran = launch(tmp_path, "fsdp2", *ONE_STEP, use_cpu=False)

    assert [s.world_size for s in ran.strategies] == [1]  # both write as rank 0
    assert "each process trains alone" in only_finding(ran, "world-size-not-in-force")


def test_a_misspelt_deepspeed_config_file_is_zero_2_without_offload(tmp_path: Path) -> None:
    file = changed(tmp_path, "zero3_offload_all", "deepspeed_config_file:", "deepspeed_config_fle:")
    ran = launch(tmp_path, file, *ONE_STEP, fresh=LOOKED_AT)

    assert [(s.zero_stage, dict(s.offload)) for s in ran.strategies] == [(2, {})] * 2
    assert {"zero-stage-not-in-force", "offload-not-in-force"} == {
        c for c in ran.findings if "-not-" in c
    }
    assert "`deepspeed_config_fle` is not a known key" in str(
        ran.findings["zero-stage-not-in-force"]
    )


@pytest.mark.all
def test_a_machine_of_several_trains_alone_without_the_standard_launcher(tmp_path: Path) -> None:
    file = changed(
        tmp_path,
        "zero3_multinode",
        "deepspeed_multinode_launcher: standard",
        "zero3_init_flag: true",
    )
    file.write_text(file.read_text().replace("  zero3_init_flag: true\n", "", 1))
    flags = ("--num_machines", "2", "--machine_rank", "0", "--main_process_ip", "127.0.0.1")
    ran = launch(tmp_path, file, *ONE_STEP, flags=flags, fresh=LOOKED_AT)

    assert {s.num_machines for s in ran.strategies} == {1}
    assert "deepspeed_multinode_launcher: standard" in only_finding(ran, "world-size-not-in-force")


@pytest.mark.all
def test_a_zero_stage_on_the_command_line_is_passed_over(tmp_path: Path) -> None:
    ran = launch(tmp_path, "zero3", *ONE_STEP, flags=("--zero_stage", "2"), fresh=LOOKED_AT)

    assert {s.zero_stage for s in ran.strategies} == {3}
    assert "accelerate ignores --zero_stage" in only_finding(ran, "zero-stage-not-in-force")


@pytest.mark.slow
@pytest.mark.skipif(
    find_library("aio") is None, reason="needs libaio (Debian: apt-get install libaio-dev)"
)
@pytest.mark.skipif("CI" in os.environ, reason="DeepSpeed's async_io takes minutes to compile")
def test_weights_too_small_for_the_drive_stay_in_memory(tmp_path: Path) -> None:
    drive = tmp_path / "drive"
    drive.mkdir()
    values = {"device": "nvme", "nvme_path": drive}
    overrides = [
        f"zero_optimization.offload_{what}.{k}={v}"
        for what in ("optimizer", "param")
        for k, v in values.items()
    ]
    file = copy("zero3_offload_nvme", tmp_path, overrides)
    ran = launch(tmp_path, file, *ONE_STEP, "--hidden_size", "256")

    assert [dict(s.offload) for s in ran.strategies] == [{"optimizer": "nvme", "param": "nvme"}] * 2
    assert all("nvme" not in s.homes for s in ran.strategies)
    assert "you get `device: cpu`" in only_finding(ran, "offload-not-in-force")


def test_activation_checkpointing_in_the_json_does_nothing(tmp_path: Path) -> None:
    block = '"activation_checkpointing": {"partition_activations": true},\n      "bf16": {'
    file = changed(tmp_path, "zero3", '"bf16": {', block)
    ran = launch(tmp_path, file, *ONE_STEP)

    assert f"--{checkpointing.NAME} True" in only_finding(ran, "checkpointing-not-in-force")
    again = launch(tmp_path / "again", file, *ONE_STEP, "--gradient_checkpointing")
    assert [s.is_checkpointing for s in again.strategies] == [True, True]
    assert not [
        finding for finding in again.findings.values() if finding.severity >= Severity.WARNING
    ]
