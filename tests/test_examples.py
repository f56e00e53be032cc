"""The examples do what they say, each on the CPU, without a download."""

import json
import os
import runpy
import shutil
import sys
from pathlib import Path

import pytest

import trainer_plugins
from tests import processes
from tests.distributed import extensions
from tests.distributed.launched import ABORTED_AFTER_THE_WORK, environment
from trainer_plugins.record.history import read_history
from trainer_plugins.report.summary import peaks
from trainer_plugins.units import size

EXAMPLES = Path(__file__).parent.parent / "examples"
SHORT = sorted(
    path
    for path in EXAMPLES.rglob("*")
    if path.suffix in (".py", ".sh", ".yml")
    and path.name not in ("quickstart.py", "train.py")  # older, and tested by files of their own
)


@pytest.mark.parametrize("path", SHORT, ids=lambda path: str(path.name))
def test_an_example_is_read_at_one_look(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 65


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("causal_lm", "peak memory in the logs: "),
        ("seq2seq", "generated tokens that are right: "),
        ("sft_lora", "trained 17,408 parameters of adapters, loss "),
        ("dpo", "margin of rewards: 0.0000 -> "),
    ],
)
def test_a_training(name: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    if name in ("sft_lora", "dpo"):
        pytest.importorskip("trl")
    example = runpy.run_path(str(EXAMPLES / f"{name}.py"))
    try:
        example["main"](str(tmp_path))
    finally:
        trainer_plugins.detach()
    assert says in capsys.readouterr().out


@pytest.mark.all
def test_an_evaluation_that_runs_out_of_memory_and_is_mended(tmp_path: Path) -> None:
    if shutil.which("c++") is None and not os.environ.get("CI"):
        pytest.skip("no C++ compiler")
    # the simulated card has to come before anything that this process has computed
    done = processes.run([sys.executable, EXAMPLES / "evaluation_oom.py", tmp_path])
    assert done.returncode == 0, done.stderr[-3000:]
    assert "without preprocess_logits_for_metrics: allocator: " in done.stdout
    assert "with it: evaluated" in done.stdout
    assert (tmp_path / "_trainer_plugins" / "oom-rank0.json").exists()


@pytest.mark.all
def test_a_hydra_app(tmp_path: Path) -> None:
    pytest.importorskip("hydra")
    app = str(EXAMPLES / "hydra_app" / "hydra_app.py")
    command = [sys.executable, app, "+trainer_plugins=memory_safe"]
    done = processes.run(command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (
        tmp_path / "runs" / "hydra_app" / "_trainer_plugins" / "memory" / "rank-0.jsonl"
    ).exists()


def test_the_cells_of_the_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    notebook = json.loads((EXAMPLES / "notebook.ipynb").read_text())
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    names: dict = {}
    for cell in cells:
        exec(compile(cell, "<cell>", "exec"), names)
    assert len(names["entries"]) > 10
    plan, page = names["plan"], names["page"]
    assert plan.fits
    assert size(plan.moments["backward"].allocated_bytes) in trainer_plugins.draw(plan)
    run = read_history(tmp_path / "runs" / "notebook").runs[0]  # of two
    peak = next(each for each in peaks(run.timelines) if each.moment == "train")
    assert size(peak.peak_bytes) in page
    assert "<iframe" in page._repr_html_()
    assert names["freed"].freed_bytes >= 0
    assert not any(cell.get("outputs") for cell in notebook["cells"])


@pytest.mark.all
@pytest.mark.slow
def test_zero3_with_offload_on_two_ranks(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    extensions.build("cpu")  # or the ranks would compile, and leave a lock if they are ended
    for folder in ("once", "again"):
        script = [EXAMPLES / "zero3_offload.sh", tmp_path / folder]
        done = processes.run(script, environ=environment())
        if ABORTED_AFTER_THE_WORK not in done.stderr:
            break
    assert done.returncode == 0, done.stderr[-3000:]
    assert "2 ranks of DeepSpeedEngine on cpu, ZeRO-3" in " ".join(done.stdout.split())
