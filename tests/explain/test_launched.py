"""A launch file is in `run.json`: a plan of the recorded run is the plan of the file, which may be gone."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from tests import processes
from tests.distributed.launched import LOOKED_AT, command, ended, environment, start, torchrun
from trainer_plugins import OOMReporter
from trainer_plugins.drycuda.predict import predict_all
from trainer_plugins.explain.run import explain_run
from trainer_plugins.explain.run.case import Case
from trainer_plugins.explain.run.predicted import request_of
from trainer_plugins.launch.configs import path
from trainer_plugins.oom import classify
from trainer_plugins.planner.plan import MemoryPlan
from trainer_plugins.record.folder import write_new
from trainer_plugins.record.oom_record import OomRecord, Shape
from trainer_plugins.record.run_facts import Launch, RunFacts, read_run_facts

SCRIPT = Path(__file__).with_name("launched_run.py")
FULL = (
    "CUDA out of memory. Tried to allocate 2.00 MiB. GPU 0 has a total capacity of 6.00 MiB of which"
    " 1.00 MiB is free. Of the allocated memory 5.00 MiB is allocated by PyTorch, and 0 bytes is"
    " reserved by PyTorch but unallocated."
)


def written(folder: Path, file: Path, *flags: str) -> RunFacts:
    """What a real launch on two ranks of the CPU wrote down."""
    call = [*command(file, flags, SCRIPT), str(folder / "run")]
    text = ended(start(call, folder, fresh=LOOKED_AT), folder)
    found = read_run_facts(folder / "run")
    assert len(found) == 1, text[-3000:]
    return found[0]


def as_on_cards(facts: RunFacts) -> OomRecord:
    """The record of the same run on two small cards, where its first step did not fit."""
    error = classify(f"torch.OutOfMemoryError: {FULL}")
    assert error is not None
    return OomRecord(
        time_seconds=facts.time_seconds + 1,
        rank=0,
        call="train",
        step=0,
        moment="train",
        part="forward",
        error_class="OutOfMemoryError",
        error=error,
        frames=(),
        batch={"input_ids": Shape(shape=(2, 32), dtype="int64")},
        run=replace(facts, device="cuda:0", card="a card", capability=(9, 0)),
    )


def launch_of(facts: RunFacts) -> Launch:
    assert facts.launch is not None
    return facts.launch


def zero_2_by_flags(folder: Path) -> Path:
    """A launch file that names no file of DeepSpeed's."""
    config = {"zero_stage": 2, "gradient_accumulation_steps": 1, "offload_optimizer_device": "none"}
    file = folder / "stage2.yaml"
    whole: Mapping[str, object] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "DEEPSPEED",
        "num_processes": 2,
        "deepspeed_config": config,
    }
    file.write_text(json.dumps(whole))
    return file


def test_the_settings_of_a_launch_are_written_without_secrets(make_trainer, monkeypatch) -> None:
    named = {"zero_optimization": {"stage": 2}, "aio": {"access_key": "abc"}}
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", json.dumps(named))
    monkeypatch.setenv("ACCELERATE_LOG_TOKEN", "abc")
    trainer = make_trainer(OOMReporter(), max_steps=1)
    trainer.train()
    (facts,) = read_run_facts(Path(trainer.args.output_dir))
    launch = launch_of(facts)
    assert launch.deepspeed == {**named, "aio": {"access_key": "(hidden)"}}
    assert launch.environment["ACCELERATE_LOG_TOKEN"] == "(hidden)"
    assert "ACCELERATE_DEEPSPEED_CONFIG_FILE" not in launch.environment


KILLS_RANK_1 = """
import os, select, signal, sys
from pathlib import Path
from transformers import Trainer, TrainerCallback, TrainingArguments
from tests.models import tiny_llama, token_rows
from trainer_plugins import MemoryWatchdog, OOMReporter
class Kills(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 2 and args.process_index == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if state.global_step == 2:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            while not Path("out/_trainer_plugins/memory/rank-1.gone").exists():
                select.select([], [], [], 0.01)
            os.kill(os.getpid(), signal.SIGKILL)
args = TrainingArguments("out", max_steps=4, report_to="none", save_strategy="no", use_cpu=True)
callbacks = [MemoryWatchdog(), OOMReporter(), Kills()]
Trainer(tiny_llama(), args, train_dataset=token_rows(), callbacks=callbacks).train()
"""


@pytest.mark.slow
@pytest.mark.all
def test_of_ranks_that_are_all_silent_the_one_that_ended_first_is_named(tmp_path) -> None:
    """Its launcher ends the others, which are in the middle of a step."""
    (tmp_path / "train.py").write_text(KILLS_RANK_1)
    processes.run([*torchrun(2), "train.py"], cwd=tmp_path, environ=environment(), fresh=LOOKED_AT)

    said = explain_run(tmp_path / "out")
    assert said.causes[0].summary.startswith("rank 1 of 2 ended without a word")


@pytest.mark.all
@pytest.mark.slow
@pytest.mark.parametrize("name", ["fsdp2", "zero3", "stage2"])
def test_the_plan_of_a_recorded_launch_is_that_of_its_file(tmp_path, name: str) -> None:
    file = tmp_path / f"{name}.yaml"
    if name == "stage2":
        zero_2_by_flags(tmp_path)
    else:
        shutil.copy(path(name), file)
    facts = written(tmp_path / name, file)
    assert launch_of(facts).file == str(file)
    assert launch_of(facts).words[:3] == ("accelerate", "launch", "--config_file")
    record = as_on_cards(facts)
    by_record = request_of(Case(record))
    by_file = replace(by_record, environment={}, launch_file=str(file))
    recorded, expected = predict_all([by_record, by_file])
    assert isinstance(recorded, MemoryPlan), recorded
    assert isinstance(expected, MemoryPlan), expected
    kind = {"fsdp2": "FSDP2", "zero3": "DeepSpeed ZeRO-3", "stage2": "DeepSpeed ZeRO-2"}[name]
    assert kind in recorded.planned["strategy"]
    assert kind in expected.planned["strategy"]
    assert recorded.breakdown == expected.breakdown
    assert recorded.reserved_peak_bytes == expected.reserved_peak_bytes

    file.unlink()
    write_new(tmp_path / "died", "oom-rank0", asdict(record))
    said = explain_run(tmp_path / "died", predicts=True)
    assert f"it was launched with {file}" in said.facts
    assert any(each.startswith("the plan of the run as it was: ") for each in said.facts), (
        said.unknown
    )
    assert "predicted" in [each.grade for each in said.remedies]
