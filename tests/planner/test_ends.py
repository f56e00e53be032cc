"""A prediction that ends early: one line says how, and nothing of it is left, no process and no folder."""

import ctypes
import json
import os
import pty
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
from transformers import Trainer
from typer.testing import CliRunner

from tests import processes
from tests.models import SMALL_GPT2
from tests.planner.several import IS_TOO_OLD, WHY_NOT
from trainer_plugins import forks, plan_run
from trainer_plugins.cli import app
from trainer_plugins.planner import PlanError
from trainer_plugins.planner.predict import _IMPORTS

BERT = str(Path(__file__).parent / "configs" / "bert-base.json")


class Crashing(Trainer):
    """Somebody's Trainer with native code of its own, which reads where nothing is."""

    def compute_loss(self, *args, **kwargs):
        ctypes.string_at(0)


def planners() -> list[psutil.Process]:
    """The server of this process from which plans are forked, if there is one."""
    children = [each for each in psutil.Process().children() if _is_alive(each.pid)]
    return [each for each in children if _IMPORTS[-1] in each.cmdline()]


@pytest.fixture(autouse=True)
def _leaves_nothing(tmp_path, monkeypatch):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    yield
    assert list(scratch.iterdir()) == []
    assert not any(server.children() for server in planners())


def _is_alive(pid: int) -> bool:
    try:
        return (
            psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        )  # which waits for whoever has inherited it
    except psutil.NoSuchProcess:
        return False


def test_a_crash_says_where(make_trainer):
    with pytest.raises(
        PlanError, match=r"crashed with SIGSEGV in compute_loss \(test_ends.py, line \d+\)"
    ):
        plan_run(make_trainer(trainer_class=Crashing))


def stuck_at(compiler: str, tmp_path: Path) -> dict[str, str]:
    """The environment of a prediction whose compiler of the fake card, its one program, ends in another way."""
    script, cache = tmp_path / "compiler", tmp_path / "empty"  # where a prediction writes for real
    script.write_text(f"#!/bin/sh\necho $$ > {cache}/asked\n{compiler}\n")
    script.chmod(0o755)
    return {"CXX": str(script), "TRAINER_PLUGINS_CACHE": str(cache)}


def test_an_early_end_is_one_line_and_exit_code_2(tmp_path):
    done = CliRunner().invoke(
        app, ["plan", "--model", BERT], env=stuck_at("kill -KILL $PPID", tmp_path)
    )
    assert done.exit_code == 2
    assert "the prediction was killed, most likely because main memory ran out" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not _is_alive(int((tmp_path / "empty" / "asked").read_text()))


@pytest.mark.all(unless=lambda name: name == "SIGTERM")
@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGKILL"])
def test_whatever_ends_the_command_ends_all_of_it(tmp_path, name):
    """A compiler that does not end holds the prediction up; it keeps a pipe open, which says when it is gone."""
    pipe, script = tmp_path / "empty" / "pipe", tmp_path / "compiler"
    pipe.parent.mkdir()
    os.mkfifo(pipe)
    script.write_text(f"#!/bin/sh\nexec 9> {pipe}\necho $$ >&9\nexec tail -f /dev/null\n")
    script.chmod(0o755)
    scratch = tmp_path / "scratch"
    reads = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        command = subprocess.Popen(
            [sys.executable, "-m", "trainer_plugins", "plan", "--model", BERT],
            env={
                **os.environ,
                "CXX": str(script),
                "TRAINER_PLUGINS_CACHE": str(tmp_path / "empty"),
                "TMPDIR": str(scratch),
            },
            stderr=subprocess.DEVNULL,
            preexec_fn=lambda: signal.signal(
                signal.SIGHUP, signal.SIG_DFL
            ),  # ignored by what runs under nohup
        )
        assert select.select([reads], [], [], 300)[0], "the prediction came to no compiler"
        compiler = int(os.read(reads, 100))
        worker = psutil.Process(compiler).ppid()
        server = psutil.Process(worker).ppid()
        assert psutil.Process(server).ppid() == command.pid
        assert len(list(scratch.iterdir())) == 1

        command.send_signal(getattr(signal, name))
        assert command.wait(120) == -getattr(signal, name)
        assert select.select([reads], [], [], 120)[0], "the compiler goes on"
        assert os.read(reads, 100) == b""
    finally:
        os.close(reads)
    for killed in (server, worker, compiler):
        for _ in range(2400):  # a process that was killed takes a moment to go
            if not _is_alive(killed):
                break
            select.select([], [], [], 0.05)
        assert not _is_alive(killed)
    assert list(scratch.iterdir()) == []


@pytest.mark.skipif(IS_TOO_OLD, reason=WHY_NOT)
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
    done = subprocess.run(
        [program, "plan", *words],
        check=False,
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=600,
        env={**os.environ, "TMPDIR": str(tmp_path / "scratch")},
    )

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["num_gpus"] == 2


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["--timeout", "-1"],
            "the time limit is a number of seconds, above 0 and of a week at most, got -1",
        ),
        (["--timeout", "0"], "got 0"),
        (["--timeout", "nan"], "the time limit is a number of seconds"),
        (["--timeout", "inf"], "the time limit is a number of seconds"),
        (
            ["--timeout", "-1", "--search", "--gpu", "24GiB"],
            "the time limit is a number of seconds",
        ),
        (
            ["--seq-length", str(10**15)],
            "a sequence length is a number of tokens from 1 to 16,777,216, got 1,000,000,",
        ),
        (["--seq-length", "0"], "got 0"),
        (["--seq-length", "-5"], "got -5"),
        (["--target-length", "0"], "a target length is a number of tokens"),
        (["--per_device_train_batch_size", "-1"], "must be at least 1, got -1"),
        (["--eval_accumulation_steps=0"], "--eval_accumulation_steps must be at least 1"),
        (["--learning_rate", "nan"], "--learning_rate needs a finite number, got nan"),
        (["--seq-length", "513"], "a row has 513 tokens (--seq-length), and the model has"),
        (["--eval-batches", "-1"], "an evaluation has from 1 to 16,777,216 batches, got -1"),
        (["--lora-r", "0"], "--lora-r is a rank from 1"),
        (
            ["--per_device_train_batch_size", str(10**15)],
            "per_device_train_batch_size is a number of rows from 1 to",
        ),
        (
            ["--per_device_train_batch_size", "0"],
            "--per_device_train_batch_size must be at least 1, got 0",
        ),
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


def test_a_terminal_sees_what_it_is_doing_and_then_nothing_of_it(tmp_path):
    """Until then the compiler of the fake card waits for this test; then it ends the prediction."""
    script, seen_it = tmp_path / "compiler", tmp_path / "empty" / "seen"
    seen_it.parent.mkdir()
    os.mkfifo(seen_it)
    script.write_text(f"#!/bin/sh\nread line < {seen_it}\nkill -KILL $PPID\n")
    script.chmod(0o755)
    ours, theirs = pty.openpty()
    command = [
        str(Path(sys.executable).parent / "trainer-plugins"),
        "plan",
        "--model",
        BERT,
        "--timeout",
        "240",
    ]
    started = subprocess.Popen(
        command,
        stderr=theirs,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "CXX": str(script), "TRAINER_PLUGINS_CACHE": str(tmp_path / "empty")},
    )
    os.close(theirs)
    seen = b""
    try:
        while part := os.read(ours, 4096):
            seen += part
            if b"planning: compiling a fake CUDA device (" in seen and seen_it.exists():
                with seen_it.open("w") as told:
                    told.write("seen\n")
                seen_it.unlink()
    except OSError:  # Linux's way to say that the other end is closed
        pass
    assert started.wait(60) == 2
    steps = seen.decode().split("\r\x1b[K")
    assert any(step.startswith("planning: starting Python") for step in steps)
    assert any(step.startswith("planning: compiling a fake CUDA device (") for step in steps)
    assert steps[-1].startswith("trainer-plugins plan: the prediction was killed")


class Endless(Trainer):
    """Somebody's Trainer whose model takes a row token by token, and has no last one."""

    def compute_loss(self, *args, **kwargs):
        def forever(hidden):
            while True:
                hidden = hidden + 0

        self.model.lm_head.forward = forever
        return super().compute_loss(*args, **kwargs)


@pytest.mark.all
@pytest.mark.slow
def test_a_prediction_without_an_end_says_where_it_was(tmp_path, make_trainer, monkeypatch):
    """After much longer than a whole plan takes here and now, with all the imports."""
    monkeypatch.setattr(forks, "_current", None)
    begun = time.monotonic()
    plan_run(make_trainer())
    seconds = max(10, int(3 * (time.monotonic() - begun)))
    command = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "trainer_plugins",
            "plan",
            "--model",
            BERT,
            "--timeout",
            str(seconds),
        ],
        env={
            **os.environ,
            **stuck_at("exec tail -f /dev/null", tmp_path),
            "TMPDIR": str(tmp_path / "scratch"),
        },
        stderr=subprocess.PIPE,
        text=True,
    )
    line = (
        rf"given up after {seconds} s, when it was rehearsing the training, step 1 of 3, in the forward of lm_head"
        r" \([\d,]+ operations so far: a loop, as over the tokens of a row\)"
        r" in forever \(test_ends.py, line \d+\)"
    )
    with pytest.raises(PlanError, match=line):
        plan_run(make_trainer(trainer_class=Endless), timeout_seconds=seconds)

    _, said = command.communicate()
    assert command.returncode == 2
    assert f"the prediction was given up after {seconds} s, when it was " in said
    assert len(said.strip().splitlines()) == 1
    assert not _is_alive(int((tmp_path / "empty" / "asked").read_text()))


def test_the_imports_may_take_too_long_too(monkeypatch):
    before = planners()
    monkeypatch.setattr(forks, "_current", None)
    line = "given up after 0 s, when it was starting Python and importing torch and transformers"
    with pytest.raises(PlanError, match=line):
        plan_run(SMALL_GPT2, {"output_dir": "runs"}, timeout_seconds=0.1)
    assert planners() == before


@pytest.mark.parametrize("seconds", [0, -1, float("inf"), float("nan")])
def test_a_time_out_that_is_none(seconds):
    with pytest.raises(PlanError, match="the time limit is a number of seconds"):
        plan_run({"model_type": "llama"}, {"output_dir": "runs"}, timeout_seconds=seconds)


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
from typer.testing import CliRunner
from trainer_plugins.cli import app

atexit.register(print, "nanobind: leaked 64 types!\\nSee refleaks.html", file=sys.stderr)
place = Path(__file__).with_name("config.json")
print(CliRunner().invoke(app, ["plan", "--model", str(place), "--lora-r", "4"]).output, flush=True)
"""


def test_a_script_with_the_name_of_a_library_plans_once(tmp_path: Path) -> None:
    """Its plan imports it instead of the library: each such plan would begin another."""
    pytest.importorskip("peft")
    (tmp_path / "peft.py").write_text(NAMED_LIKE_A_LIBRARY)
    (tmp_path / "config.json").write_text(json.dumps(SMALL_GPT2))
    call: list[str | Path] = [sys.executable, tmp_path / "peft.py"]
    done = processes.run(call, cwd=Path("/"), fresh="what it imports is the question")
    assert f"({tmp_path / 'peft.py'})" in done.stdout, done.stdout + done.stderr[-2000:]
