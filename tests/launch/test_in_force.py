"""What was asked against what runs, as values: each difference by itself, and silence where there is none."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from accelerate.commands.launch import _validate_launch_command, launch_command_parser

from trainer_plugins import advice
from trainer_plugins.advice import Door
from trainer_plugins.launch.asked import Asked, read_asked, read_launcher
from trainer_plugins.launch.launcher import Launcher
from trainer_plugins.launch.verify import verify
from trainer_plugins.strategy import Strategy

ZERO3 = Strategy(
    distributed_type="DEEPSPEED",
    wrapped_class="DeepSpeedEngine",
    family="DeepSpeed",
    world_size=8,
    num_machines=1,
    device="cuda",
    num_params=1_000_000,
    num_partitioned=999_000,
    zero_stage=3,
    offload={"optimizer": "cpu", "param": "nvme"},
    homes={"nvme": 125_000},
    optimizer_class="DeepSpeedCPUAdam",
    master_dtype="bfloat16",
    is_checkpointing=True,
)
ASKED = Asked(
    source="mine.yaml",
    distributed_type="DEEPSPEED",
    world_size=8,
    num_machines=1,
    zero_stage=3,
    offload={"optimizer": "cpu", "param": "nvme"},
    bf16_master=True,
    checkpointing=True,
)
PLAIN = replace(
    ZERO3,
    family="nothing",
    zero_stage=None,
    offload={},
    homes={"cuda": 1_000_000},
    num_partitioned=0,
)
DP = replace(PLAIN, wrapped_class="DataParallel", family="DataParallel", world_size=1)
DDP = replace(PLAIN, wrapped_class="DistributedDataParallel", family="DDP")
FSDP = replace(PLAIN, wrapped_class="FSDPLlama", family="FSDP", num_partitioned=1_000_000)


@pytest.mark.parametrize(
    ("asked", "runs", "code", "cause"),
    [
        (ASKED, replace(ZERO3, world_size=4), "world-size-not-in-force", "Compare num_processes"),
        (replace(ASKED, num_machines=2), ZERO3, "world-size-not-in-force", "deepspeed_multinode_launcher"),
        (Asked(distributed_type="MULTI_GPU", num_machines=2), replace(DDP, num_machines=1),
         "world-size-not-in-force", "--machine_rank"),
        (Asked(distributed_type="MULTI_GPU", world_size=8), replace(PLAIN, world_size=1),
         "world-size-not-in-force", "one process was started"),
        (Asked(world_size=2, started=2), replace(PLAIN, world_size=1, device="cpu"),
         "world-size-not-in-force", "give --use_cpu"),
        (Asked(distributed_type="DEEPSPEED", world_size=2, one_process_for="--cpu"), replace(PLAIN, world_size=1),
         "world-size-not-in-force", "starts one process because of --cpu"),
        (ASKED, DDP, "strategy-not-in-force", "PartialState"),
        (replace(ASKED, use_cpu=True), DDP, "strategy-not-in-force", "Unset ACCELERATE_USE_CPU"),
        (Asked(distributed_type="NO"), DP, "strategy-not-in-force", "CUDA_VISIBLE_DEVICES"),
        (ASKED, replace(ZERO3, zero_stage=2), "zero-stage-not-in-force", "default_config.yaml"),
        (ASKED, replace(ZERO3, offload={"param": "nvme"}), "offload-not-in-force", "optimizer offload to cpu"),
        (ASKED, replace(ZERO3, homes={"cpu": 125_000}), "offload-not-in-force", "1 MiB"),
        (Asked(distributed_type="FSDP", offload={"fsdp": "cpu"}), FSDP, "offload-not-in-force", "fsdp offload to cpu"),
        (ASKED, replace(ZERO3, num_partitioned=400_000), "parameters-not-partitioned", "persistence_threshold"),
        (ASKED, replace(ZERO3, master_dtype="float32"), "master-weights-not-in-force", "bf16"),
        (ASKED, replace(ZERO3, is_checkpointing=False), "checkpointing-not-in-force", advice.CHECKPOINTING.flag(Door.TRAINER)),
    ],
)  # fmt: skip
def test_each_difference_is_named_with_its_usual_cause(
    asked: Asked, runs: Strategy, code: str, cause: str
) -> None:
    (finding,) = verify(asked, runs)

    assert finding.code == code
    assert cause in str(finding)


@pytest.mark.parametrize(
    ("asked", "runs"),
    [
        (ASKED, ZERO3),
        (Asked(), ZERO3),
        (Asked(world_size=8), ZERO3),
        (replace(ASKED, num_machines=2), replace(ZERO3, num_machines=None)),  # all ranks are there
        (Asked(distributed_type="MULTI_GPU", world_size=8), DDP),
        (
            Asked(distributed_type="MULTI_GPU", world_size=8),
            replace(PLAIN, num_partitioned=500_000),
        ),  # by tensor
        (Asked(distributed_type="MULTI_GPU", world_size=1), replace(PLAIN, world_size=1)),
        (
            Asked(distributed_type="FSDP", world_size=8),
            replace(PLAIN, family="unknown", device="xla"),
        ),
        (Asked(distributed_type="NO", world_size=1), replace(PLAIN, world_size=1)),
        (
            Asked(distributed_type="DEEPSPEED", world_size=1, one_process_for="--cpu"),
            replace(PLAIN, world_size=1),
        ),
        (Asked(distributed_type="MEGATRON_LM", world_size=8), PLAIN),
    ],
)
def test_what_runs_as_asked_is_not_remarked(asked: Asked, runs: Strategy) -> None:
    assert verify(asked, runs) == ()


JSON = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}
ZERO2_FILE = {
    "distributed_type": "DEEPSPEED",
    "num_processes": 4,
    "deepspeed_config": {"zero_stage": 2, "offload_optimizer_device": "cpu"},
}
FSDP_FILE = {
    "distributed_type": "FSDP",
    "num_processes": 4,
    "fsdp_config": {"fsdp_version": 2, "offload_params": True},
}


@pytest.mark.parametrize(
    ("flags", "file"),
    [
        ("--use_deepspeed --zero_stage 3 --offload_param_device cpu --num_processes 2", None),
        ("--use_deepspeed --deepspeed_config_file z3.json", None),
        ("", ZERO2_FILE),
        ("--num_processes 8 --zero_stage 3", ZERO2_FILE),
        ("--offload_optimizer_device none", ZERO2_FILE),
        ("", {**ZERO2_FILE, "deepspeed_config": {"deepspeed_config_file": "z3.json"}}),
        ("", FSDP_FILE),
        ("--fsdp_offload_params false", FSDP_FILE),
        ("--multi_gpu --num_processes 2", ZERO2_FILE),
        ("--use_megatron_lm", ZERO2_FILE),
    ],
)
def test_flags_and_files_are_read_as_accelerate_reads_them(
    flags: str, file: dict | None, tmp_path: Path
) -> None:
    (tmp_path / "z3.json").write_text(json.dumps(JSON))
    arguments = flags.split()
    if file is not None:
        full = {
            "compute_environment": "LOCAL_MACHINE",
            "num_machines": 1,
            "machine_rank": 0,
            "use_cpu": False,
            **file,
        }
        (tmp_path / "mine.json").write_text(json.dumps(full))
        arguments = ["--config_file", str(tmp_path / "mine.json"), *arguments]
    asked = read_launcher(Launcher((*arguments, "train.py"), tmp_path))
    assert asked is not None

    resolved, _, _ = _validate_launch_command(
        launch_command_parser().parse_args([*arguments, "train.py"])
    )
    assert asked.family == (
        "DeepSpeed"
        if resolved.use_deepspeed
        else "FSDP"
        if resolved.use_fsdp
        else "DDP"
        if resolved.multi_gpu
        else None
    )
    if "num_processes" in flags or file:
        assert asked.world_size == resolved.num_processes
    if resolved.use_deepspeed and resolved.deepspeed_config_file:
        assert (asked.zero_stage, asked.offload) == (3, {"optimizer": "cpu"})
    elif resolved.use_deepspeed:
        devices = {
            "optimizer": resolved.offload_optimizer_device,
            "param": resolved.offload_param_device,
        }
        assert asked.zero_stage == int(resolved.zero_stage)
        assert asked.offload == {
            what: where for what, where in devices.items() if where not in (None, "none")
        }
    elif resolved.use_fsdp:
        assert bool(asked.offload) == (str(resolved.fsdp_offload_params).lower() == "true")


def test_flags_that_accelerate_passes_over_were_meant(tmp_path: Path) -> None:
    (tmp_path / "z3.json").write_text(json.dumps(JSON))
    arguments = "--use_deepspeed --deepspeed_config_file z3.json --zero_stage 2 --offload_optimizer_device none train.py"
    asked = read_launcher(Launcher(tuple(arguments.split()), tmp_path))
    assert asked is not None

    assert (asked.zero_stage, asked.offload) == (2, {})
    assert asked.flags_beside_json == ("--offload_optimizer_device", "--zero_stage")


def test_a_launcher_of_another_version_is_not_guessed_at(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert read_launcher(Launcher(("--of-a-later-version", "train.py"), tmp_path)) is None
    assert capsys.readouterr().err == ""


def test_training_arguments_count_more_than_the_environment() -> None:
    environ = {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_CONFIG_FILE": "none",
        "WORLD_SIZE": "2",
    }
    given = {
        "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}},
        "activation_checkpointing": {"x": 1},
    }

    asked = read_asked(environ, deepspeed=given)

    assert (asked.family, asked.zero_stage, asked.world_size) == ("DeepSpeed", 3, 2)
    assert asked.offload == {"param": "cpu"}
    assert asked.checkpointing
    assert read_asked(environ).zero_stage is None
    assert read_asked({"ACCELERATE_USE_FSDP": "1"}).family == "FSDP"
