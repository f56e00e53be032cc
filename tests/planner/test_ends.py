"""A prediction that ends early: one line says how, and nothing of it is left, no process and no folder."""

import ctypes
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
        ("exec tail -f /dev/null", "15", "the prediction was given up after 15 s"),
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
