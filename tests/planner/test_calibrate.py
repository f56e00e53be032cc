"""A plan beside the run that it was made for: really run on the simulated card, with a context scripted onto it."""

import io
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console
from transformers import Trainer

from tests.models import tiny_llama, token_rows
from tests.schemas import read_answer
from tests.written import read_entries
from trainer_plugins import MemoryPlan, MemoryWatchdog, StrategyInForce, plan_run
from trainer_plugins.cli import app
from trainer_plugins.compiled import cache_folder
from trainer_plugins.planner.before import plan_before
from trainer_plugins.planner.calibrate import (
    Calibration,
    add_measured_context,
    calibrate,
    context_file,
    keep_context,
)
from trainer_plugins.planner.cards import Card
from trainer_plugins.planner.plan import MomentPeak, PlanError
from trainer_plugins.record.timeline import Sample
from trainer_plugins.report.plans_text import calibration_report
from trainer_plugins.units import GIB, MIB

CONTEXT = 300 * MIB


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """A cache of its own that has the builds and the compiled libraries of the usual one."""
    folder = tmp_path / "cache"
    folder.mkdir()
    for each in cache_folder().absolute().iterdir():
        if each.name != "contexts":
            (folder / each.name).symlink_to(each)
    monkeypatch.setenv("TRAINER_PLUGINS_CACHE", str(folder))
    return folder


@pytest.fixture
def make(simgpu, make_trainer):
    simgpu.set_capacity(4 * GIB)
    return lambda: evaluating(make_trainer)


def evaluating(make_trainer) -> Trainer:
    settings: dict[str, Any] = {
        "max_steps": 4,
        "per_device_train_batch_size": 8,
        "per_device_eval_batch_size": 4,
    }
    settings |= {"save_strategy": "steps", "save_steps": 4, "eval_strategy": "steps"}
    callbacks = (MemoryWatchdog(), StrategyInForce())
    made = make_trainer(*callbacks, model=tiny_llama(), eval_steps=4, **settings)
    made.train_dataset, made.eval_dataset = token_rows(32), token_rows(16)
    assert isinstance(made, Trainer)
    return made


def as_it_ran(plan: MemoryPlan, folder: Path) -> MemoryPlan:
    """The plan with the peaks that the run had."""
    readings = [(each.moment, each.reading) for each in read_entries(folder, Sample)]

    def peak(of: str) -> MomentPeak:
        found = [reading for moment, reading in readings if moment == of]
        return MomentPeak(
            allocated_bytes=max(each.peak_allocated_bytes for each in found),
            reserved_bytes=max(each.reserved_bytes for each in found),
        )

    train, evaluation, save = peak("train"), peak("eval"), peak("save")
    reserved = max(each.reserved_bytes for each in (train, evaluation, save))
    return replace(
        plan,
        moments={
            "forward": train,
            "backward": train,
            "optimizer step": train,
            "evaluation": evaluation,
            "save": save,
        },
        reserved_peak_bytes=reserved,
        nvidia_smi_peak_bytes=reserved + plan.context_bytes,
    )


def counters(found: Calibration) -> dict[tuple[str, str], float]:
    return {(each.moment, each.counter): each.fraction for each in found.differences}


def said(found: Calibration) -> str:
    console = Console(record=True, width=400, file=io.StringIO())
    console.print(calibration_report(found))
    return console.export_text()


def tampered(folder: Path, change) -> Path:
    """The timeline of rank 0, each line changed."""
    file = folder / "_trainer_plugins" / "memory" / "rank-0.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps(change(line)) + "\n" for line in lines))
    return folder


@pytest.mark.all
def test_a_plan_meets_its_run_and_the_next_one_has_the_context(cache, make, simgpu):
    trainer = make()
    keep_context("simgpu", 7 * MIB, Path("/another/run"))
    plan = plan_run(trainer, calibration=False)
    before = plan_before(trainer, Path("/nowhere"))
    assert before is not None
    assert before.nvidia_smi_peak_bytes == plan.nvidia_smi_peak_bytes
    assert plan.context_bytes == 0
    simgpu.card().hold(os.getpid(), CONTEXT, "the context")
    trainer.train()

    folder = Path(trainer.args.output_dir)
    plan = as_it_ran(plan, folder)
    found = calibrate(plan, folder)
    met = counters(found)
    assert {moment for moment, _ in met} == {"train", "eval", "save"}
    for (moment, counter), fraction in met.items():
        if counter != "card":
            assert fraction == pytest.approx(0, abs=0.01), (moment, counter)
    assert -1 < met["train", "card"] < -0.3  # it knew of no context
    assert [abs(each.fraction) for each in found.differences] == sorted(
        map(abs, met.values()), reverse=True
    )
    for words in (
        "train",
        f"{met['train', 'allocated']:+.2%}",
        "300.0 MiB of the card was in use outside the allocator",
        "To undo this, delete",
    ):
        assert words in said(found)
    assert found.context_bytes == CONTEXT
    assert found.kept_in == context_file("simgpu")
    assert found.kept_in.is_relative_to(cache)

    again = plan_run(make())
    assert again.context_bytes == CONTEXT
    assert again.nvidia_smi_peak_bytes == again.reserved_peak_bytes + CONTEXT
    assert any(
        str(found.kept_in) in line and "--no-calibration" in line for line in again.assumptions
    )
    again = as_it_ran(again, folder)
    assert counters(calibrate(again, folder))["train", "card"] == pytest.approx(0, abs=0.01)

    twice = tampered(
        folder,
        lambda line: {**line, "peak_allocated_bytes": 2 * line.get("peak_allocated_bytes", 0)},
    )
    assert counters(calibrate(again, twice))["train", "allocated"] == pytest.approx(-0.5, abs=0.01)
    refusals(again, folder)


def refusals(plan: MemoryPlan, folder: Path) -> None:
    for other, line in (
        (replace(plan, num_parameters=17), "parameters, the plan is for one of 17"),
        (replace(plan, num_gpus=8), "the run had 1 ranks, the plan has 8 GPUs"),
        (
            replace(plan, capacity_bytes=80 * GIB),
            "of 4.00 GiB, the plan is for simgpu of 80.00 GiB",
        ),
    ):
        with pytest.raises(PlanError, match=line):
            calibrate(other, folder)
    kept = calibrate(replace(plan, gpu=None), folder)
    assert kept.kept_in is None
    assert kept.remarks == ("the context size is not stored: name the card with --gpu",)
    context_file("simgpu").unlink()
    tampered(folder, lambda line: {**line, "free_bytes": max(0, line.get("free_bytes", 0) - GIB)})
    foreign = calibrate(plan, folder)
    assert foreign.kept_in is None
    assert not context_file("simgpu").exists()
    assert "is more than a context, which" in foreign.remarks[-1]


def test_runs_without_readings_are_bad_input(tmp_path):
    (tmp_path / "_trainer_plugins" / "memory").mkdir(parents=True)
    for content, line in (
        (None, "has no memory/rank-*.jsonl"),
        ("half a li", "has no reading of a training step"),
    ):
        if content is not None:
            (tmp_path / "_trainer_plugins" / "memory" / "rank-0.jsonl").write_text(content)
        done = CliRunner().invoke(
            app, ["plan", "--model", "/no/such/place", "--calibrate", str(tmp_path)]
        )
        assert done.exit_code == 2
        assert line in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1


def test_what_is_kept_belongs_to_a_card_and_what_is_damaged_is_not_used(cache):
    card = Card(name="NVIDIA H100 80GB", capacity_bytes=80 * GIB)
    file = keep_context(card.name, CONTEXT, Path("/a/run"))
    assert add_measured_context(card).context_bytes == CONTEXT
    assert add_measured_context(replace(card, name="a100-80gb")).context_source is None
    file.write_text("{")
    assert add_measured_context(card) == card


@pytest.mark.all
def test_the_command_compares_and_keeps(cache, make, tmp_path):
    trainer = make()
    trainer.train()
    config = tmp_path / "config.json"
    config.write_text(json.dumps(trainer.model.config.to_dict()))
    flags = "--seq-length 128 --per_device_train_batch_size 8 --gpu 4GiB"
    asked = ["--model", str(config), *flags.split()]
    done = CliRunner().invoke(
        app, ["plan", *asked, "--calibrate", trainer.args.output_dir, "--json"]
    )
    assert done.exit_code == 0, done.output
    printed = read_answer(done.stdout, "plan")
    samples = read_entries(trainer.args.output_dir, Sample)
    peaks = [each.reading.peak_allocated_bytes for each in samples if each.moment == "train"]
    assert {
        "moment": "train",
        "counter": "allocated",
        "predicted_bytes": max(
            printed["moments"][name]["allocated_bytes"]
            for name in ("forward", "backward", "optimizer step")
        ),
        "measured_bytes": max(peaks),
    } in printed["calibration"]["differences"]
    assert printed["calibration"]["kept_in"] == str(context_file("4GiB"))
    assert any("is a guess" in line for line in printed["assumptions"])
