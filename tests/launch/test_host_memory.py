"""Main memory: the linter's arithmetic says what the planner found by running the code."""

import json
import sys
from pathlib import Path

import pytest

from tests.test_cli import command
from trainer_plugins.finding import Severity
from trainer_plugins.launch import configs
from trainer_plugins.launch.lint.document import read_document
from trainer_plugins.launch.lint.host_memory import host_need
from trainer_plugins.launch.lint.judge import judge_document
from trainer_plugins.launch.main_memory import HostLimits
from trainer_plugins.units import GIB

if sys.version_info >= (3, 11):
    import tomllib
else:  # pytest brings it
    import tomli as tomllib

PLANS = tomllib.loads(Path(__file__).with_name("host_memory.toml").read_text())["plan"]


def test_plans_are_of_every_file_that_can_be_planned() -> None:
    assert {plan["file"] for plan in PLANS} == {*configs.names()} - {"zero3_offload_nvme"}
    assert {plan["size"] for plan in PLANS} == {"1B", "7B", "70B"}


@pytest.mark.parametrize("plan", PLANS, ids=lambda p: f"{p['file']}-{p['size']}-{p['ranks']}")
def test_check_says_what_plan_says(plan) -> None:
    document = read_document(configs.path(plan["file"]))
    need = host_need(document, plan["params"], plan["ranks"], is_mapped=True)
    assert need.tensor_bytes == pytest.approx(plan["tensors"], rel=0.05)
    # the rounding of each weight depends on the widths of a model
    assert need.pinned_bytes == pytest.approx(plan["pinned"], rel=0.3)


def test_what_a_machine_has_is_judged_with_the_processes_and_what_can_be_pinned() -> None:
    file = configs.path("zero3_offload_all")
    need = host_need(read_document(file), 9.4e9, 1)
    assert need.total_bytes > need.tensor_bytes > need.pinned_bytes > 0

    def found(**limits):
        host = HostLimits(**limits)
        return [*map(str, judge_document(read_document(file), num_params=9.4e9, host=host))]

    assert not found()
    assert not found(total_bytes=2 * need.total_bytes, pinned_bytes=need.pinned_bytes)
    assert "but has" in found(total_bytes=need.tensor_bytes)[0]
    (pinned,) = found(total_bytes=2 * need.total_bytes, pinned_bytes=2 * GIB)
    assert "but can pin 2.00 GiB" in pinned


def test_what_a_save_gathers_is_counted_as_in_the_plan(tmp_path: Path) -> None:
    """LLaMA-Factory#4629: 9.4 billion parameters; the plan says 248.81 GiB, and it was killed."""
    offload = {"device": "cpu", "pin_memory": True}
    stage_3 = {"stage": 3, "offload_optimizer": offload, "offload_param": offload}
    gathers = "stage3_gather_16bit_weights_on_model_save"

    def found(**more):
        file = tmp_path / "ds_z3_offload_config.json"
        file.write_text(json.dumps({"zero_optimization": stage_3 | more}))
        limit = HostLimits(total_bytes=252 * 10**9)
        judged = judge_document(read_document(file), num_params=9.4e9, host=limit)
        return next(each for each in judged if each.code == "config-host-memory")

    killed, without = found(**{gathers: True}), found()
    assert killed.severity is Severity.ERROR
    assert killed.amount == pytest.approx(248.81, rel=0.01)
    assert without.severity is Severity.WARNING
    assert killed.amount - without.amount == pytest.approx(2 * 9.4e9 / GIB)


def test_ranks_that_load_all_weights_each_are_a_warning_where_they_may_share_them() -> None:
    def found(main_memory: int):
        limit = HostLimits(total_bytes=main_memory * GIB)
        return [
            *judge_document(
                read_document(configs.path("ddp")), num_params=30e9, num_ranks=8, host=limit
            )
        ]

    assert not found(500)
    (each_its_own,) = found(200)
    assert each_its_own.severity is Severity.WARNING
    assert "while loading, each machine needs" in each_its_own.summary
    assert [each.severity for each in found(40)] == [Severity.ERROR]


def test_buffers_for_a_drive_are_counted_as_deepspeed_makes_them(tmp_path: Path) -> None:
    """DeepSpeed#4571: killed with 26 GB in use, though everything was to wait on a drive."""

    def need(**of_zero):
        drive = {"device": "nvme", "nvme_path": "/drive"}
        weights = {**drive, "buffer_count": 5, "buffer_size": of_zero.pop("buffer_size")}
        weights["max_in_cpu"] = of_zero.pop("max_in_cpu")
        zero = {"stage": 3, "offload_optimizer": drive, "offload_param": weights, **of_zero}
        file = tmp_path / "nvme.json"
        file.write_text(json.dumps({"zero_optimization": zero}))
        return host_need(read_document(file), 6.7e9, 1)

    gradients = 16 * GIB  # 13.4e9 bytes, pinned in a power of two
    large = need(buffer_size=1e9, max_in_cpu=1e9)
    assert large.tensor_bytes == gradients + 4 * 4e9 + 5 * 2e9 + 2 * GIB
    small = need(buffer_size=2e8, max_in_cpu=0, sub_group_size=1e8)
    assert small.tensor_bytes == pytest.approx(gradients + 4 * 4e8 + 5 * 4e8)


def test_more_ranks_need_more_for_the_start_of_fsdp2() -> None:
    file = configs.path("fsdp2")
    few, many = (
        judge_document(
            read_document(file),
            num_params=34e9,
            num_ranks=ranks,
            host=HostLimits(total_bytes=500 * GIB),
        )
        for ranks in (2, 8)
    )
    assert not few
    assert "8 ranks on a machine" in str(many)


def test_the_command_takes_the_ranks(tmp_path: Path) -> None:
    asked = (
        "configs",
        "check",
        configs.path("fsdp2"),
        "--params",
        "34e9",
        "--host-memory",
        "1000GB",
    )
    assert command(*asked, "--num-gpus", "2").returncode == 0
    done = command(*asked, "--num-gpus", "8")
    assert (done.returncode, "config-host-memory" in done.stdout) == (1, True)
    assert command(*asked, "--pinned-memory", "much").returncode == 2
