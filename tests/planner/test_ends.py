"""A plan that cannot be made, or ends early: one line says how, and nothing of it is left."""

import ctypes
import json
import os
import sys
import tempfile
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner
from transformers import Trainer

from tests import processes
from tests.models import SMALL_GPT2
from trainer_plugins import plan_run
from trainer_plugins.cli import app
from trainer_plugins.drycuda.command import _IMPORTS
from trainer_plugins.planner.plan import PlanError
from trainer_plugins.units import GIB, MIB

BERT = str(Path(__file__).parent / "configs" / "bert-base.json")


class Crashing(Trainer):
    """Somebody's Trainer with native code of its own, which reads where nothing is."""

    def compute_loss(self, *args, **kwargs):
        ctypes.string_at(0)


def planners() -> list[psutil.Process]:
    """The servers of this process from which plans are forked."""
    return [each for each in psutil.Process().children() if _IMPORTS[-1] in each.cmdline()]


@pytest.fixture(autouse=True)
def _leaves_nothing(tmp_path, monkeypatch):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    yield
    assert list(scratch.iterdir()) == []
    assert not any(server.children() for server in planners())


@pytest.mark.all
def test_a_crash_is_said(make_trainer):
    with pytest.raises(PlanError, match="exited with code -11 before a Trainer had trained"):
        plan_run(make_trainer(trainer_class=Crashing))


class Hoards(Trainer):
    """Somebody's Trainer that keeps ever more in main memory."""

    def compute_loss(self, *args, **kwargs):
        kept = []
        while True:
            kept.append(b"x" * (64 * MIB))


def test_a_prediction_that_takes_ever_more_of_main_memory_is_stopped(make_trainer, monkeypatch):
    machine = psutil.virtual_memory()._replace(total=4 * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: machine)
    with pytest.raises(PlanError, match=r"took [23]\.\d+ GiB of main memory, and was stopped"):
        plan_run(make_trainer(trainer_class=Hoards))


class Endless(Trainer):
    """Somebody's Trainer whose loss has no end."""

    def compute_loss(self, *args, **kwargs):
        while True:
            super().compute_loss(*args, **kwargs)


@pytest.mark.all
def test_a_prediction_without_an_end_is_given_up(make_trainer):
    plan_run(make_trainer())  # the imports are done, however long they take here
    with pytest.raises(PlanError, match="took more than 10 s: raise --timeout"):
        plan_run(make_trainer(trainer_class=Endless), timeout_seconds=10)


@pytest.mark.all
def test_a_file_of_the_user_is_not_taken_for_a_module_of_python(tmp_path):
    """The command runs where a project lies, and finds its relative paths there, but no modules."""
    folder = tmp_path / "project"
    folder.mkdir()
    for name in ("timeit", "calendar", "transformers"):
        (folder / f"{name}.py").write_text(f"raise RuntimeError('{name} of the user was imported')")
    (folder / "config.json").write_text(json.dumps(SMALL_GPT2))
    (folder / "launch.yaml").write_text("distributed_type: MULTI_GPU\nnum_processes: 2\n")
    program = (
        Path(sys.executable).parent / "trainer-plugins"
    )  # python -m would look there by itself
    words = ["--model", ".", "--seq-length", "64", "--accelerate-config", "launch.yaml", "--json"]
    environ = {**os.environ, "TMPDIR": str(tmp_path / "scratch")}
    why = "its start looks for modules"
    done = processes.run([program, "plan", *words], cwd=folder, environ=environ, fresh=why)

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["num_gpus"] == 2


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--timeout", "-1"], "--timeout must be above 0 and at most a week, in seconds, got -1"),
        (["--timeout", "0"], "got 0"),
        (["--timeout", "nan"], "--timeout must be above 0"),
        (["--timeout", "inf"], "--timeout must be above 0"),
        (["--timeout", "-1", "--search", "--gpu", "24GiB"], "--timeout must be above 0"),
        (["--seq-length", "0"], "--seq-length must be at least 1, got 0"),
        (["--seq-length", "-5"], "got -5"),
        (["--seq-length", str(10**15)], "--seq-length must be at most 16,777,216, got 1,000,"),
        (["--target-length", "0"], "--target-length must be at least 1, got 0"),
        (["--per_device_train_batch_size", "-1"], "must be at least 1, got -1"),
        (["--eval_accumulation_steps=0"], "--eval_accumulation_steps must be at least 1"),
        (["--learning_rate", "nan"], "--learning_rate needs a finite number, got nan"),
        (["--seq-length", "513"], "--seq-length 513 is more than the model's 512 positions ("),
        (["--eval-batches", "-1"], "--eval-batches must be at least 1, got -1"),
        (["--lora-r", "0"], "--lora-r is a rank from 1"),
        (["--per_device_train_batch_size", "0"], "batch_size must be at least 1, got 0"),
    ],
)
def test_numbers_that_nobody_can_mean_are_refused(words, says):
    done = CliRunner().invoke(app, ["plan", "--model", BERT, *words])

    assert done.exit_code == 2, done.output
    assert says in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_config_that_nests_without_end_is_none(tmp_path):
    (tmp_path / "config.json").write_text('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}")
    done = CliRunner().invoke(app, ["plan", "--model", str(tmp_path)])

    assert done.exit_code == 2
    assert f"{tmp_path / 'config.json'} is not JSON" in done.stderr


@pytest.mark.all
def test_plans_of_one_process_share_a_server(monkeypatch):
    """A variable that torch reads when it is imported is the reason for another."""

    def server_after_a_plan() -> int:
        plan_run(SMALL_GPT2, {"output_dir": "runs"}, seq_length=64)
        (server,) = planners()
        assert server.children() == []
        return server.pid

    first = server_after_a_plan()
    assert server_after_a_plan() == first
    monkeypatch.setenv("TORCH_LOGS", "+dynamo")
    assert server_after_a_plan() != first


NAMED_LIKE_A_LIBRARY = """
import atexit
import json
import sys
from pathlib import Path
from click.testing import CliRunner
from trainer_plugins.cli import app

atexit.register(print, "nanobind: leaked 64 types!\\nSee refleaks.html", file=sys.stderr)
place = Path(__file__).with_name("config.json")
print(CliRunner().invoke(app, ["plan", "--model", str(place), "--lora-r", "4"]).output, flush=True)
"""


@pytest.mark.all
def test_a_script_with_the_name_of_a_library_plans_once(tmp_path: Path) -> None:
    """Its plan imports it instead of the library: each such plan would begin another."""
    pytest.importorskip("peft")
    (tmp_path / "peft.py").write_text(NAMED_LIKE_A_LIBRARY)
    (tmp_path / "config.json").write_text(json.dumps(SMALL_GPT2))
    call: list[str | Path] = [sys.executable, tmp_path / "peft.py"]
    done = processes.run(call, cwd=Path("/"), fresh="what it imports is the question")
    assert f"({tmp_path / 'peft.py'})" in done.stdout, done.stdout + done.stderr[-2000:]
