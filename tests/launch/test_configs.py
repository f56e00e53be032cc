"""The shipped launch files: their names are true, they work from anywhere, and a copy is whole or not there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests import processes
from tests.test_cli import command
from trainer_plugins.launch import configs
from trainer_plugins.launch.lint.document import Document, read_document

FAMILY = {
    *(
        "single_device",
        "ddp",
        "zero2",
        "zero3",
        "zero3_offload_optimizer",
        "zero3_offload_all",
        "zero3_offload_nvme",
    ),
    *("one_gpu_7b_offload", "fsdp2", "fsdp2_offload"),
    *("ddp_multinode", "zero3_multinode", "zero3_offload_all_multinode", "fsdp2_multinode"),
}


def document(name: str) -> Document:
    return read_document(configs.path(name))


def test_the_family_is_complete() -> None:
    assert set(configs.names()) == FAMILY


@pytest.mark.parametrize("name", configs.names())
def test_a_file_does_what_its_name_says(name: str) -> None:
    found = document(name)
    accelerate = found.accelerate or {}
    zero = (found.deepspeed or {}).get("zero_optimization", {})

    assert bool(found.offload_devices) is ("offload" in name)
    assert ("nvme" in found.offload_devices.values()) is ("nvme" in name)
    if name.startswith("zero"):
        assert accelerate["distributed_type"] == "DEEPSPEED"
        assert zero["stage"] == int(name[4])
    if "offload_all" in name:
        assert found.offload_devices == {"optimizer": "cpu", "param": "cpu"}
        # The values the recipe is known by.
        assert zero["reduce_bucket_size"] == zero["stage3_prefetch_bucket_size"] == 50_000_000
        assert zero["stage3_param_persistence_threshold"] == 100_000
    if name.startswith(("single", "one_gpu")):
        assert accelerate["num_processes"] == 1
    if name.startswith("fsdp2"):
        assert (accelerate["distributed_type"], accelerate["fsdp_config"]["fsdp_version"]) == (
            "FSDP",
            2,
        )
    assert (accelerate["num_machines"] > 1) is name.endswith("_multinode")
    if name.endswith("_multinode") and found.deepspeed:
        assert accelerate["deepspeed_config"]["deepspeed_multinode_launcher"] == "standard"


@pytest.mark.parametrize("name", [name for name in configs.names() if name.endswith("_multinode")])
def test_a_multinode_file_differs_from_its_sibling_in_the_machines_only(name: str) -> None:
    many, one = document(name), document(name.removesuffix("_multinode"))
    machines = {
        "num_machines",
        "num_processes",
        "main_process_ip",
        "main_process_port",
        "rdzv_backend",
        "same_network",
    }
    differ = {
        key
        for key in {*(many.accelerate or {}), *(one.accelerate or {})} - {"deepspeed_config"}
        if (many.accelerate or {}).get(key) != (one.accelerate or {}).get(key)
    }

    assert differ == machines
    assert many.deepspeed == one.deepspeed


@pytest.mark.parametrize("name", configs.names())
def test_the_header_says_for_whom_and_at_what_price(name: str) -> None:
    header = configs.read(name).split("compute_environment")[0]

    assert "# For: " in header
    assert "Cost" in header or "PRICE" in header
    assert f"configs/accelerate/{name}.yaml" in header
    assert (
        name == "single_device"
        or "ot yet measured on a GPU" in header
        or "not yet measured" in header
    )
    assert max(map(len, configs.read(name).splitlines())) <= 120


def test_list_show_and_path() -> None:
    listed, shown, where = (
        command("configs", *words) for words in (("list",), ("show", "zero3"), ("path", "zero3"))
    )

    assert all(name in listed.stdout for name in configs.names())
    assert yaml.safe_load(shown.stdout)["distributed_type"] == "DEEPSPEED"
    assert Path(where.stdout.strip()).read_text() == shown.stdout


@pytest.mark.parametrize(
    "words",
    [("show", "zero3_ofload_all"), ("path", "zero3_ofload_all"), ("copy", "zero3_ofload_all")],
)
def test_an_unknown_name_is_answered_with_the_nearest(words: tuple[str, str]) -> None:
    done = command("configs", *words)

    assert done.returncode == 2
    assert "did you mean zero3_offload_all?" in said(done)


def said(done: subprocess.CompletedProcess[str]) -> str:
    return " ".join(done.stderr.replace("│", " ").split())


def test_a_copy_with_other_values_keeps_its_comments(tmp_path: Path) -> None:
    words = [
        "zero_optimization.reduce_bucket_size=2e8",
        "num_processes=4",
        "deepspeed_config.zero3_init_flag=false",
    ]
    words += ["zero_optimization.sub_group_size=5e8"]

    target = configs.copy("zero3_offload_all", tmp_path / "new", words)

    copied, shipped = read_document(target), document("zero3_offload_all")
    zero = (copied.deepspeed or {})["zero_optimization"]
    assert zero.pop("sub_group_size") == 500_000_000
    assert zero["reduce_bucket_size"] == 200_000_000
    assert zero == {
        **(shipped.deepspeed or {})["zero_optimization"],
        "reduce_bucket_size": 200_000_000,
    }
    assert (copied.accelerate or {})["num_processes"] == 4
    assert (copied.accelerate or {})["deepspeed_config"]["zero3_init_flag"] is False
    assert target.read_text().count("#") == configs.read("zero3_offload_all").count("#") + 1


@pytest.mark.parametrize(
    ("name", "words", "says", "says_no_more"),
    [
        (
            "zero3",
            ["num_processes=4"],
            ["zero3.yaml train.py", "runs 4 processes", "Changed in this copy: num_processes=4"],
            ["--num_processes 2", "on each card"],
        ),
        (
            "ddp_multinode",
            ["num_processes=32", "num_machines=4"],
            ["--num_machines 4", "--num_processes 32", "num_processes=32, num_machines=4"],
            ["--num_processes 16", "--num_machines 2"],
        ),
        ("zero2", ["zero_optimization.reduce_bucket_size=2e8"], ["[--num_processes 2]"], []),
        ("fsdp2", [], ["[--num_processes 2]"], ["Changed"]),
    ],
)
def test_the_comments_of_a_copy_are_true_of_it(
    tmp_path: Path, name: str, words: list[str], says: list[str], says_no_more: list[str]
) -> None:
    target = configs.copy(name, tmp_path, words)

    comments = "".join(line for line in target.open() if line.startswith("#"))
    assert f"--config_file {target} " in comments
    for each in says:
        assert each in comments
    for each in ("configs/accelerate/", *says_no_more):
        assert each not in comments


@pytest.mark.parametrize(
    ("name", "override", "answer"),
    [
        (
            "zero3",
            "zero_optimization.reduce_bucket_sise=2e8",
            "did you mean zero_optimization.reduce_bucket_size?",
        ),
        ("zero3", "reduce_bucket_size=2e8", "did you mean zero_optimization.reduce_bucket_size?"),
        ("zero3", "zero_optimization.reduce_bucket_size=large", "config-wrong-type"),
        ("zero3", "zero_optimization.reduce_bucket_size", "key=value"),
        ("zero3", "mixed_precision=bf16", "config-refused-beside-json"),
        (
            "zero3_offload_nvme",
            "zero_optimization.offload_optimizer.nvme_path=swap",
            "config-nvme-path",
        ),
        ("zero3", "num_processes=many", "config-wrong-type"),
        ("ddp", "zero_optimization.stage=2", "does not run DeepSpeed"),
        ("ddp", "fsdp_config.fsdp_version=2", "has no fsdp_config"),
    ],
)
def test_an_override_that_would_not_run_is_refused(
    tmp_path: Path, name: str, override: str, answer: str
) -> None:
    done = command("configs", "copy", name, tmp_path, "--set", override)

    assert done.returncode == 2
    assert answer in said(done)
    assert not list(tmp_path.iterdir())


def test_a_file_that_is_there_stays_without_force(tmp_path: Path) -> None:
    (tmp_path / "zero3.yaml").write_text("mine")

    refused = command("configs", "copy", "zero3", tmp_path)

    assert refused.returncode == 2
    assert "--force" in said(refused)
    assert (tmp_path / "zero3.yaml").read_text() == "mine"
    assert command("configs", "copy", "zero3", tmp_path, "--force").returncode == 0
    copied, shipped = (tmp_path / "zero3.yaml").read_text(), configs.read("zero3")
    assert copied == shipped.replace("configs/accelerate/zero3.yaml", f"{tmp_path}/zero3.yaml")
    assert [path.name for path in tmp_path.iterdir()] == ["zero3.yaml"]


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    done = command("configs", "copy", "zero3", tmp_path / "file" / "below")

    assert done.returncode == 2
    assert "is not writable" in said(done)


@pytest.mark.parametrize(
    ("name", "words"), [("ddp", ["--num_processes", "2"]), ("zero3_offload_all_multinode", [])]
)
@pytest.mark.all(but=1)
def test_accelerate_launch_from_another_directory(
    tmp_path: Path, name: str, words: list[str]
) -> None:
    """The real launch: ranks come up, and the DeepSpeed JSON arrives in them."""
    (tmp_path / "train.py").write_text(
        "import json, os\n"
        "config = json.loads(os.environ.get('ACCELERATE_DEEPSPEED_CONFIG_FILE', '{}'))\n"
        "stage = config.get('zero_optimization', {}).get('stage')\n"
        "rank = os.environ['RANK']\n"
        "open(f'rank-{rank}', 'w').write(f\"{rank} of {os.environ['WORLD_SIZE']}, stage {stage}\")\n"
    )
    if name.endswith("_multinode"):
        pytest.importorskip("deepspeed")
        words = ["--num_machines", "1", "--num_processes", "1"]
    words = [*words, "--main_process_port", "0"]
    path = command("configs", "path", name).stdout.strip()
    environment = {**os.environ, "PYTHONPATH": "", "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    launch = (sys.executable, "-m", "accelerate.commands.launch", "--config_file", path, *words)
    done = processes.run([*launch, "train.py"], cwd=tmp_path, environ=environment)

    assert done.returncode == 0, done.stderr
    stage = None if name == "ddp" else 3
    world = 2 if name == "ddp" else 1
    found = {
        path.read_text() for path in tmp_path.glob("rank-*")
    }  # not stdout, into which ranks print at once
    assert found == {f"{rank} of {world}, stage {stage}" for rank in range(world)}


def test_a_misspelt_path_makes_no_folders(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="No such file or directory"):
        configs.copy("zero3", tmp_path / "no" / "such")
    assert not list(tmp_path.iterdir())
