"""A run that dies of an out-of-memory error leaves a record, and whatever goes wrong, the error goes on."""

import gc
import inspect
import json
import os
import pickle
import re
import resource
import shutil
import signal
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.utils._paths import filter_repo_objects
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from tests.events import at, takes
from tests.models import tiny_llama, token_rows
from tests.written import read_entries
from trainer_plugins import MemoryWatchdog, OOMReporter, protect, report_oom
from trainer_plugins.planner.before import remember
from trainer_plugins.planner.plan import MemoryPlan
from trainer_plugins.record.oom_record import OomRecord, Planned, read_oom_records
from trainer_plugins.record.run_facts import read_run_facts
from trainer_plugins.record.timeline import Failure
from trainer_plugins.units import MIB

TOO_MANY = {"per_device_train_batch_size": 64}


def died(trainer, method: str = "train", *args) -> str:
    with pytest.raises(torch.OutOfMemoryError) as raised:
        getattr(trainer, method)(*args)
    return str(raised.value)


def long_rows(trainer, length: int = 128):
    trainer.train_dataset = trainer.eval_dataset = token_rows(128, length)
    return trainer


def records(tmp_path: Path) -> list[OomRecord]:
    return read_oom_records(tmp_path / "run")


def test_a_training_that_dies_says_when_why_and_what_was_alive(
    make_trainer, small, tmp_path, capfd
) -> None:
    trainer = long_rows(make_trainer(MemoryWatchdog(), OOMReporter(), **TOO_MANY))
    message = died(trainer)

    (record,) = records(tmp_path)
    assert (record.rank, record.step, record.call) == (0, 0, "train")
    assert (record.moment, record.part) == ("train", "forward")
    assert record.error_class == "OutOfMemoryError"
    assert message.splitlines()[0] in record.error.text
    assert record.error.requested_bytes is not None
    assert record.error.total_bytes == 40 * MIB
    assert record.frames[0].file == "transformers/trainer.py"
    assert record.frames[0].function == "train"
    assert not any(os.path.isabs(frame.file) for frame in record.frames)
    assert record.batch["input_ids"].shape == (64, 128)
    assert record.reading is not None
    assert record.readings[0].allocated_bytes < MIB  # at the beginning
    assert record.host is not None
    assert record.host.resident_bytes > 0

    (facts,) = read_run_facts(tmp_path / "run")
    assert facts == record.run
    assert facts.model == "LlamaForCausalLM"
    assert facts.model_config["vocab_size"] == 128
    assert facts.arguments["per_device_train_batch_size"] == 64
    assert facts.strategy is not None
    assert facts.strategy.num_params == 28832
    assert facts.versions["torch"] == version("torch")
    assert (facts.device, facts.device_bytes) == ("simgpu:0", 40 * MIB)

    (failure,) = read_entries(tmp_path / "run", Failure)
    assert failure.record == "oom-rank0.json"
    assert failure.words.startswith("OutOfMemoryError: CUDA out of memory. Tried to allocate")
    folder = tmp_path / "run"
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("trainer_pl")]
    assert said == [
        "trainer_plugins: rank 0 ran out of memory in step 0 (train, forward):"
        f" see {folder}/_trainer_plugins/oom-rank0.json, or trainer-plugins explain {folder}"
    ]


def test_the_readings_are_those_of_the_run_that_died(make_trainer, small, tmp_path) -> None:
    earlier = make_trainer(MemoryWatchdog(), OOMReporter())  # kept, and with it their timeline
    earlier.train()
    died(long_rows(make_trainer(MemoryWatchdog(), OOMReporter(), **TOO_MANY)))

    (record,) = records(tmp_path)
    assert len(record.readings) == 1  # at the beginning: it died in its first step


def test_what_is_alive_is_counted_by_category_and_the_largest_has_its_holder(
    make_trainer, small, tmp_path
) -> None:
    class Keeps(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            self.kept = torch.zeros(3 * MIB, dtype=torch.uint8, device=args.device)
            if state.global_step == 2:
                torch.zeros(64 * MIB, dtype=torch.uint8, device=args.device)

    died(make_trainer(Keeps(), OOMReporter()))

    (record,) = records(tmp_path)
    alive = record.alive
    assert record.step == 2
    assert alive is not None
    assert record.reading is not None
    weights = 28832 * 4
    assert alive.category_bytes["parameter"] == weights
    assert 2 * weights <= alive.category_bytes["optimizer"] < 2 * weights + 1000  # and its counters
    assert alive.models[0].num_bytes == weights
    head = 3 * 128 * 32 * 4  # with two states; the gradients are dropped by then
    assert head <= alive.module_bytes["LlamaForCausalLM: lm_head"] < head + 10
    assert alive.largest[0].num_bytes == 3 * MIB
    assert alive.largest[0].holder.endswith("-> Keeps.kept")
    counted = sum(alive.category_bytes.values()) + alive.hidden_bytes
    assert counted == pytest.approx(record.reading.allocated_bytes, rel=0.01)


@pytest.mark.parametrize(
    ("story", "moment"),
    [("eval", "eval"), ("evaluate", "eval"), ("predict", "predict"), ("save", "save")],
)
def test_the_moment_is_known(make_trainer, small, tmp_path, story: str, moment: str) -> None:
    every: dict[str, dict[str, Any]] = {
        "eval": {"per_device_eval_batch_size": 64, "eval_strategy": "steps", "eval_steps": 1},
        "evaluate": {"per_device_eval_batch_size": 64},
        "predict": {"per_device_eval_batch_size": 64},
        "save": {"save_strategy": "steps", "save_steps": 1},
    }
    trainer = make_trainer(OOMReporter(), **every[story])
    if story == "save":
        trainer.model.register_state_dict_pre_hook(
            lambda *_: torch.zeros(64 * MIB, dtype=torch.uint8, device="simgpu")
        )
        died(trainer)
    else:
        small.set_capacity(16 * MIB)
        trainer.eval_dataset = token_rows(128, 128)
        how = {"eval": ["train"], "predict": ["predict", trainer.eval_dataset]}
        died(trainer, *how.get(story, [story]))

    (record,) = records(tmp_path)
    assert record.moment == moment
    assert record.call == {"evaluate": "evaluate", "predict": "predict"}.get(story, "train")
    assert record.run.arguments["per_device_train_batch_size"] == 2  # also before any training
    if story != "save":
        assert record.batch["input_ids"].shape == (64, 128)


def test_a_second_run_in_the_folder_leaves_the_first_as_it_was(
    make_trainer, small, tmp_path
) -> None:
    for _ in range(2):
        died(long_rows(make_trainer(OOMReporter(), **TOO_MANY)))
        gc.collect()

    names = sorted(path.name for path in (tmp_path / "run" / "_trainer_plugins").glob("*.json"))
    assert names == ["oom-rank0-2.json", "oom-rank0.json", "run-2.json", "run.json"]
    first, second = records(tmp_path)
    assert first.run.time_seconds < first.time_seconds < second.run.time_seconds
    assert [facts.time_seconds for facts in read_run_facts(tmp_path / "run")] == [
        first.run.time_seconds,
        second.run.time_seconds,
    ]


def test_another_error_is_no_oom_and_is_noted_in_the_timeline_alone(
    make_trainer, tmp_path, capfd
) -> None:
    def fail(_) -> None:
        raise ValueError("hf_0123456789abcdef is no dataset\nsecond line")

    trainer = make_trainer(at("step_end", fail), OOMReporter())
    with pytest.raises(ValueError, match="is no dataset"):
        trainer.train()

    folder = tmp_path / "run" / "_trainer_plugins"
    assert sorted(path.name for path in folder.iterdir()) == ["memory", "run.json"]
    (failure,) = read_entries(tmp_path / "run")
    assert isinstance(failure, Failure)
    assert failure.words == "ValueError: (hidden) is no dataset"
    assert failure.record == ""
    assert "trainer_plugins:" not in capfd.readouterr().err


def test_a_folder_that_cannot_be_written_hides_no_error(
    make_trainer, small, tmp_path, capfd, caplog
) -> None:
    trainer = long_rows(make_trainer(OOMReporter(), **TOO_MANY))
    shutil.rmtree(tmp_path / "run", ignore_errors=True)
    (tmp_path / "run").write_text("a file where the folder should be")

    message = died(trainer)
    assert message.startswith("CUDA out of memory")
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("trainer_pl")]
    assert said == [
        "trainer_plugins: the out-of-memory record could not be written to"
        f" {tmp_path / 'run'}: Not a directory"
    ]
    told = [record for record in caplog.records if "run.json" in record.getMessage()]
    assert [record.exc_info for record in told] == [None]
    assert "run.json cannot be written to" in caplog.text
    assert "Traceback" not in caplog.text


def test_a_disk_that_is_full_hides_no_error_and_leaves_no_half(
    make_trainer, small, tmp_path, capfd, caplog
) -> None:
    trainer = long_rows(make_trainer(OOMReporter(), **TOO_MANY))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(
        signal.SIGXFSZ, signal.SIG_IGN
    )  # so that a write fails, as on a full disk
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        message = died(trainer)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)

    assert message.startswith("CUDA out of memory")
    ours = tmp_path / "run" / "_trainer_plugins"
    assert [path.name for path in ours.iterdir()] == ["memory"]  # no record, no run.json, no draft
    assert capfd.readouterr().err.count("the out-of-memory record could not be written to") == 1
    assert caplog.text.count("run.json cannot be written to") == 1
    assert "Traceback" not in caplog.text


def test_no_secret_is_written(make_trainer, small, tmp_path, monkeypatch) -> None:
    secret = "hf_TheTokenOfSomebody0123"
    monkeypatch.setenv("HF_TOKEN", secret)
    monkeypatch.setenv("WANDB_API_KEY", "0123456789" * 4)
    kwargs = json.dumps({"inner": [{"token": "swordfish"}]})
    command = ["--hub_token", secret, f"--x.api_key={secret}x", "--lr=1", "--kwargs", kwargs]
    command += ["++a={hub_token:swordfish,seed:1}", "--keys.api", "swordfish", "-swordfish"]
    monkeypatch.setattr("sys.argv", ["/home/me/train.py", *command])
    trainer = long_rows(make_trainer(OOMReporter(), **TOO_MANY, hub_token=secret))
    trainer.model.config.tracker = {
        "passwords": ["swordfish"],
        "url": "https://me:sword@fish@host/",
    }
    died(trainer)

    for name in ("run.json", "oom-rank0.json"):
        text = (tmp_path / "run" / "_trainer_plugins" / name).read_text()
        assert secret not in text
        assert "0123456789" not in text
        assert "swordfish" not in text
        assert "fish@" not in text
    facts = json.loads((tmp_path / "run" / "_trainer_plugins" / "run.json").read_text())
    assert facts["command"][1:5] == ["--hub_token", "(hidden)", "--x.api_key=(hidden)", "--lr=1"]
    assert facts["command"][7] == "++a=(hidden)"
    assert facts["arguments"]["per_device_train_batch_size"] == 64
    assert facts["arguments"]["hub_token"] == "(hidden)"
    assert facts["model_config"]["hidden_act"] == "silu"
    assert facts["model_config"]["tracker"] == "(hidden)"


def test_the_error_is_the_same_and_holds_nothing_back(make_trainer, small, tmp_path) -> None:
    """With the collector off, all that the failed step held comes back when the error is dropped."""

    def left_bytes(*callbacks) -> int:
        trainer = long_rows(make_trainer(*callbacks, **TOO_MANY))
        gc.collect()
        gc.disable()
        try:
            # Not by pytest.raises, which makes a cycle of the error and its frames.
            trainer.train()
        except torch.OutOfMemoryError:
            pass
        finally:
            gc.enable()
        return torch.accelerator.memory_allocated()

    bare = left_bytes()
    gc.collect()
    assert left_bytes(OOMReporter()) <= bare
    assert len(records(tmp_path)) == 1


@pytest.mark.parametrize("preset", ["observe", "memory_safe"])
def test_every_preset_records(make_trainer, small, tmp_path, preset: str) -> None:
    trainer = long_rows(make_trainer(**TOO_MANY))
    protect(trainer, preset)
    died(trainer)
    assert [record.step for record in records(tmp_path)] == [0]


def test_a_training_that_finishes_leaves_only_what_it_is(make_trainer, tmp_path) -> None:
    make_trainer(OOMReporter(), max_steps=1).train()
    (ours,) = (tmp_path / "run").iterdir()
    assert [path.name for path in ours.iterdir()] == ["run.json"]
    # As `Trainer.push_to_hub` uploads the folder.
    (ignored,) = re.findall(r"ignore_patterns=(\[.*?\])", inspect.getsource(Trainer.push_to_hub))
    uploaded = filter_repo_objects(
        [f"{ours.name}/run.json", "model.safetensors"],
        ignore_patterns=eval(ignored, {"PREFIX_CHECKPOINT_DIR": PREFIX_CHECKPOINT_DIR}),
    )
    assert list(uploaded) == ["model.safetensors"]


def test_what_was_planned_is_in_the_record(make_trainer, small, tmp_path) -> None:
    plan = MemoryPlan(
        allocated_peak_bytes=MIB,
        reserved_peak_bytes=2 * MIB,
        nvidia_smi_peak_bytes=2 * MIB,
        host_ram_bytes_per_node=0,
        moment="backward",
        breakdown={},
        moments={},
        fits=True,
    )
    of_file = json.loads(plan.to_json())
    (tmp_path / "run").mkdir()
    for content in (of_file, of_file | {"nvidia_smi_peak_bytes": "much"}, ["no plan"]):
        (tmp_path / "run" / "plan.json").write_text(json.dumps(content))
        died(long_rows(make_trainer(OOMReporter(), **TOO_MANY)))
    trainer = long_rows(make_trainer(OOMReporter(), **TOO_MANY))
    remember(trainer, plan)
    died(trainer)
    known = Planned(source="plan.json", nvidia_smi_peak_bytes=2 * MIB, moment="backward", fits=True)
    by_plan_run = replace(known, source="plan_run")
    assert [each.plan for each in records(tmp_path)] == [known, None, None, by_plan_run]


def test_code_without_a_trainer_is_recorded(small, tmp_path) -> None:
    model = tiny_llama().to("simgpu")
    optimizer = torch.optim.AdamW(model.parameters())
    rows = torch.ones(128, 128, dtype=torch.long, device="simgpu")
    model(input_ids=rows[:2], labels=rows[:2]).loss.backward()
    optimizer.step()
    with pytest.raises(torch.OutOfMemoryError), report_oom(tmp_path / "run"):
        model(input_ids=rows, labels=rows)

    (record,) = records(tmp_path)
    assert (record.call, record.moment, record.part) == ("report_oom", "other", "forward")
    assert record.alive is not None
    assert record.alive.category_bytes["gradient"] == 28832 * 4
    with pytest.raises(KeyError), report_oom(tmp_path / "other"):
        raise KeyError("x")
    with report_oom(tmp_path / "other"):
        pass
    assert not (tmp_path / "other").exists()


def test_a_snapshot_where_there_is_none_is_said(make_trainer, caplog) -> None:
    make_trainer(OOMReporter(snapshot=True), max_steps=1, use_cpu=True).train()
    assert caplog.text.count("needs a CUDA card: there is no snapshot") == (
        not torch.cuda.is_available()
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")
def test_a_snapshot_is_taken_inside_the_throw(make_trainer, tmp_path) -> None:
    died(make_trainer(at("step_end", takes(1 << 25)), OOMReporter(snapshot=True)))
    (record,) = records(tmp_path)
    ours = tmp_path / "run" / "_trainer_plugins"
    snapshot = pickle.loads((ours / record.snapshot).read_bytes())
    assert any(event["action"] == "oom" for trace in snapshot["device_traces"] for event in trace)
    assert list(ours.glob(".*")) == []


def test_an_oom_that_somebody_handles_is_none(make_trainer, simgpu, tmp_path) -> None:
    simgpu.set_capacity(40 * MIB)
    trainer = long_rows(make_trainer(OOMReporter(), **TOO_MANY, auto_find_batch_size=True))
    trainer.train()
    assert trainer.state.global_step == 8
    assert records(tmp_path) == []
