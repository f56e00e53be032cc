"""`trainer-plugins check`, as a user calls it: what it prints, its exit codes, and what it does not import."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import processes
from tests.drycuda.scripts import TRAINS, place
from tests.models import SMALL_GPT2

WITHOUT_TORCH = """
import sys
from trainer_plugins.cli import app
try:
    app()
except SystemExit as end:
    assert not {"torch", "transformers"} & set(sys.modules)
    raise
"""


def check(*arguments: object, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run it in a process that fails if torch was imported."""
    command = [sys.executable, "-c", WITHOUT_TORCH, "check", *map(str, arguments)]
    environ = {**os.environ, "TRAINER_PLUGINS_CACHE": "", **environ}
    return processes.run(command, environ=environ, fresh="it imports no torch")


def codes(printed: str) -> set[str]:
    groups = json.loads(printed)["groups"]
    return {
        found["code"] for lines in groups.values() for line in lines for found in line["findings"]
    }


def test_faults_of_the_environment_are_found_without_torch(tmp_path: Path) -> None:
    flags = ("--auto_find_batch_size", "True")
    done = check(*flags, "--json", CUDA_LAUNCH_BLOCKING="1")
    assert done.returncode == 1, done.stderr
    assert {"debug-switch", "auto-find-batch-size"} <= codes(done.stdout)
    assert json.loads(done.stdout)["worst"] == "WARNING"

    file = tmp_path / "run.yaml"
    file.write_text("distributed_type: MULTI_GPU\nnum_processes: 2\nnum_procesess: 2\n")
    done = check("--accelerate-config", file, PYTORCH_ALLOC_CONF="expandable_segments:true")
    assert done.returncode == 3, done.stderr
    assert "[config-unknown-key]" in done.stdout
    assert "[allocator-bad-value]" in done.stdout
    assert "errors" in done.stdout.splitlines()[-1]
    assert not any("  ok  " in line for line in done.stdout.splitlines())
    more = check("--accelerate-config", file, "--verbose")
    assert any("  ok  " in line for line in more.stdout.splitlines())
    assert "--verbose" not in more.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--seq-length", "long"), "Invalid value for '--seq-length'"),
        (("--accelerate-config", "/nowhere.yaml"), "cannot be read"),
        (("--model", "/nowhere"), "no model config at /nowhere"),
        (("--gpu", "h1000"), "unknown GPU"),
        (("8",), "cannot run 8: No such file or directory"),
        (("--batch-size", "8"), "knows --batch_size: is it --per-device-train-batch-size?"),
        (("--bf61", "True"), "knows --bf61: is it --bf16?"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
@pytest.mark.all(but=3)
def test_bad_input_is_one_line(arguments, said: str) -> None:
    done = check(*arguments)
    assert done.returncode == 2
    assert said in " ".join(done.stderr.replace("│", " ").split())
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_command_is_run_on_a_dry_card_and_its_arguments_are_checked(tmp_path: Path) -> None:
    place(tmp_path, TRAINS.replace("bf16=True", "bf16=True, auto_find_batch_size=True"))
    train = (sys.executable, tmp_path / "train.py", tmp_path / "model", tmp_path / "out")

    done = check("--gpu", "600MiB", "--json", "--", *train)

    assert done.returncode == 3, done.stderr
    assert {"plan-does-not-fit", "auto-find-batch-size"} <= codes(done.stdout)
    assert not (tmp_path / "out").exists()


@pytest.mark.all
@pytest.mark.slow
def test_main_memory_is_judged_as_the_plan_judges_it(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**SMALL_GPT2, "architectures": ["GPT2LMHeadModel"]}))
    run = ("--model", config, "--seq-length", 64, "--gpu", "24GiB", "--use_cpu", "False")
    fits = check(*run, "--host-memory", "64GiB", "--json")
    assert (fits.returncode, codes(fits.stdout)) == (0, set()), fits.stderr
    killed = check(*run, "--host-memory", "100MiB")
    assert killed.returncode == 3
    assert "[plan-host-memory]" in killed.stdout
