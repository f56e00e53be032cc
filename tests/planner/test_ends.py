"""A prediction that ends early: one line says how, and nothing of it is left, no process and no folder."""

import ctypes
import os
import pty
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest
from transformers import Trainer
from typer.testing import CliRunner

from trainer_plugins import plan_run
from trainer_plugins.cli import app
from trainer_plugins.planner import PlanError

BERT = str(Path(__file__).parent / "configs" / "bert-base.json")


class Crashing(Trainer):
    """Somebody's Trainer with native code of its own, which reads where nothing is."""

    def compute_loss(self, *args, **kwargs):
        ctypes.string_at(0)


@pytest.fixture(autouse=True)
def _leaves_nothing(tmp_path, monkeypatch):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    yield
    assert list(scratch.iterdir()) == []
    assert psutil.Process().children() == []


def _is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE  # which waits for whoever has inherited it
    except psutil.NoSuchProcess:
        return False


def test_a_crash_says_where(make_trainer):
    with pytest.raises(PlanError, match=r"crashed with SIGSEGV in compute_loss \(test_ends.py, line \d+\)"):
        plan_run(make_trainer(trainer_class=Crashing))


@pytest.mark.parametrize(
    ("compiler", "timeout", "line"),
    [
        ("kill -KILL $PPID", "100", "the prediction was killed, most likely because main memory ran out"),
        # Slower than the imports before it on any machine where this can be decided at all.
        ("exec tail -f /dev/null", "40", "the prediction was given up after 40 s, when it was "),
    ],
)
def test_an_early_end_is_one_line_and_exit_code_2(tmp_path, compiler, timeout, line):
    """The compiler of the fake card is the one program that a prediction starts: here it does not end well."""
    script = tmp_path / "compiler"
    script.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/asked\n{compiler}\n")
    script.chmod(0o755)
    done = CliRunner().invoke(
        app,
        ["plan", "--model", BERT, "--timeout", timeout],
        env={"CXX": str(script), "TRAINER_PLUGINS_CACHE": str(tmp_path / "empty")},
    )
    assert done.exit_code == 2
    assert line in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not _is_alive(int((tmp_path / "asked").read_text()))


def test_a_terminal_sees_what_it_is_doing_and_then_nothing_of_it(tmp_path):
    """Until then the compiler of the fake card waits for this test; then it ends the prediction."""
    script, seen_it = tmp_path / "compiler", tmp_path / "seen"
    os.mkfifo(seen_it)
    script.write_text(f"#!/bin/sh\nread line < {seen_it}\nkill -KILL $PPID\n")
    script.chmod(0o755)
    ours, theirs = pty.openpty()
    command = [str(Path(sys.executable).parent / "trainer-plugins"), "plan", "--model", BERT, "--timeout", "240"]
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
            if b"planning: compiling a card that is not there (" in seen and seen_it.exists():
                with seen_it.open("w") as told:
                    told.write("seen\n")
                seen_it.unlink()
    except OSError:  # Linux's way to say that the other end is closed
        pass
    assert started.wait(60) == 2
    steps = seen.decode().split("\r\x1b[K")
    assert any(step.startswith("planning: starting Python") for step in steps)
    assert any(step.startswith("planning: compiling a card that is not there (") for step in steps)
    assert steps[-1].startswith("trainer-plugins plan: the prediction was killed")


class Endless(Trainer):
    """Somebody's Trainer that waits for what never comes."""

    def compute_loss(self, *args, **kwargs):
        while True:
            pass


@pytest.mark.slow
def test_a_prediction_without_an_end_says_where_it_was(make_trainer):
    """As long as the imports and the two steps before it may take on a busy machine."""
    line = r"given up after 60 s, when it was rehearsing the training in compute_loss \(test_ends.py, line \d+\)"
    with pytest.raises(PlanError, match=line):
        plan_run(make_trainer(trainer_class=Endless), timeout_seconds=60)


@pytest.mark.parametrize("seconds", [0, -1, float("inf"), float("nan")])
def test_a_time_out_that_is_none(seconds):
    with pytest.raises(PlanError, match="needs a time-out above 0 s"):
        plan_run({"model_type": "llama"}, {"output_dir": "runs"}, timeout_seconds=seconds)
