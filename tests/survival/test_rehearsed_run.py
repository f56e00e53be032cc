"""A rehearsed run is told what will not fit, and is otherwise the run that it would have been."""

import copy
import dataclasses
import logging
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from torch.utils.data import IterableDataset
from transformers import (
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainerCallback,
)

from benchmarks.rehearsal import RUNS, Late, dies_at, foretold, make
from tests.models import tiny_llama
from tests.survival.failing import padded, ragged_rows, small_trainer
from trainer_plugins import MemoryPlan, Rehearsal, RehearsalError, SurviveOOM, rehearse
from trainer_plugins.planner.plan import MomentPeak
from trainer_plugins.record.timeline import Remark, read_timeline
from trainer_plugins.units import MIB

EVERYTHING = {
    "eval_strategy": "steps",
    "eval_steps": 2,
    "save_strategy": "steps",
    "save_steps": 2,
    "weight_decay": 0.1,  # which moves weights without a gradient
}
MOMENTS = ["optimizer step", "evaluation", "training", "save", "resume"]


def drawing(examples):
    """A collator that draws from every generator there is."""
    batch = padded(examples)
    for _ in range(random.randint(1, 4)):
        batch["input_ids"][np.random.randint(len(examples)), torch.randint(0, 4, ())] = 5
    return batch


class CountsPasses(Trainer):
    """Its model has a buffer that each pass moves."""

    def __init__(self, model, **kwargs) -> None:
        model.register_buffer("num_passes", torch.zeros((), dtype=torch.long))
        model.register_forward_pre_hook(lambda module, _: module.num_passes.add_(1) and None)
        super().__init__(model, **kwargs)


class Sees(TrainerCallback):
    """All that a rehearsal must leave as it was, when training begins."""

    def __init__(self) -> None:
        self.seen: dict[str, object] = {}

    def on_train_begin(self, args, state, control, model, optimizer, lr_scheduler, **kwargs):
        self.seen = {
            "weights": [p.detach().clone() for p in model.parameters()],
            "gradients": [p.grad for p in model.parameters()],
            "buffers": [b.clone() for b in model.buffers()],
            "modes": [module.training for module in model.modules()],
            "states": [
                torch.as_tensor(v).clone()
                for state in optimizer.state.values()
                for v in state.values()
                if torch.as_tensor(v).any()
            ],
            "groups": [{**group, "params": 0} for group in optimizer.param_groups],
            "scheduler": lr_scheduler.state_dict(),
            "python": random.getstate(),
            "numpy": np.random.get_state(legacy=False)["state"]["key"].tolist(),
            "torch": torch.get_rng_state(),
            "arguments": args.to_dict(),
            "state": copy.deepcopy(dataclasses.asdict(state)),
            "generation": model.generation_config.to_dict(),
        }


class Trained:
    """Four steps of two micro-batches, evaluated and saved, with dropout."""

    def __init__(self, folder, *callbacks, how=None, resume=None, **kwargs) -> None:
        before, self.after = Sees(), Sees()
        self.trainer = small_trainer(
            folder, tiny_llama(attention_dropout=0.2), steps=4, use_cpu=False,
            **{"eval_dataset": ragged_rows(16), "data_collator": drawing, **EVERYTHING, **kwargs},
        )  # fmt: skip
        for each in (before, *callbacks, self.after):
            self.trainer.add_callback(each)
        for generator in (random.seed, np.random.seed, torch.manual_seed):
            generator(1)
        self.told = how(self.trainer) if how else None
        self.trainer.train(resume_from_checkpoint=resume)
        self.changed = [
            name for name in before.seen if not equal(before.seen[name], self.after.seen[name])
        ]
        self.weights = [p.detach().cpu() for p in self.trainer.model.parameters()]
        self.logged = [
            {k: v for k, v in logs.items() if "runtime" not in k and "per_second" not in k}
            for logs in self.trainer.state.log_history
        ]

    def is_the_run(self, other: "Trained") -> bool:
        return equal(self.weights, other.weights) and self.logged == other.logged


def equal(one, other) -> bool:
    if torch.is_tensor(one):
        return torch.equal(one, other)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(v, other[k]) for k, v in one.items())
    return one == other or (one != one and other != other)


@pytest.mark.parametrize("optim", ["adamw_torch", "adafactor", "sgd"])
def test_the_run_is_the_one_that_it_would_have_been(tmp_path, simgpu, optim: str) -> None:
    options = {"optim": optim, "trainer_class": CountsPasses}
    rehearsal = Rehearsal()
    rehearsed = Trained(tmp_path / "rehearsed", rehearsal, **options)
    alone = Trained(tmp_path / "alone", **options)

    assert [each.moment for each in rehearsal.report.moments] == MOMENTS
    assert all(each.peak_bytes and not each.failure for each in rehearsal.report.moments)
    assert rehearsed.changed == []
    assert rehearsed.is_the_run(alone)
    assert {path.name for path in (tmp_path / "rehearsed").iterdir()} == {
        *("checkpoint-2", "checkpoint-4", "_trainer_plugins")
    }


def test_a_resumed_run_is_too(tmp_path, simgpu) -> None:
    Trained(tmp_path / "run")
    checkpoint, rehearsal = str(tmp_path / "run" / "checkpoint-2"), Rehearsal()
    resumed = Trained(tmp_path / "rehearsed", rehearsal, resume=checkpoint)
    alone = Trained(tmp_path / "alone", resume=checkpoint)

    assert resumed.changed == []
    assert resumed.after.seen["states"], "those of the checkpoint"
    assert [each.failure for each in rehearsal.report.moments] == [""] * 5
    assert resumed.is_the_run(alone)


def test_one_that_is_rehearsed_by_a_call_has_not_begun(tmp_path, simgpu) -> None:
    heard: list[str] = []

    class Hears(TrainerCallback):
        def on_train_begin(self, *_, **__):
            heard.append("begin")

    def told(trainer):
        trainer.add_callback(Hears())
        report = rehearse(trainer)
        assert (heard, trainer.optimizer, trainer.state.global_step) == ([], None, 0)
        return report

    rehearsed = Trained(tmp_path / "rehearsed", how=told)
    alone = Trained(tmp_path / "alone")

    assert rehearsed.told is not None
    assert [each.moment for each in rehearsed.told.moments] == MOMENTS
    assert heard == ["begin"]
    assert rehearsed.is_the_run(alone)


def test_the_counters_of_trl_are_what_they_were(tmp_path, simgpu) -> None:
    pytest.importorskip("trl")
    from tests.survival.test_trl import sft

    def logged(folder, *callbacks) -> list[dict]:
        trainer = sft(folder, use_cpu=False, eval_strategy="no")
        for each in callbacks:
            trainer.add_callback(each)
        trainer.train()
        return [
            {k: v for k, v in logs.items() if "runtime" not in k and "per_second" not in k}
            for logs in trainer.state.log_history
        ]

    rehearsal = Rehearsal()
    assert logged(tmp_path / "rehearsed", rehearsal) == logged(tmp_path / "alone")
    assert [each.failure for each in rehearsal.report.moments] == ["", ""]


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.moment)
def test_a_run_that_dies_late_is_refused_first(tmp_path, simgpu, run: Late) -> None:
    lost, error = dies_at(run, tmp_path / "late", 6)
    assert (lost, error.partition(".")[0]) == (6, "CUDA out of memory")

    _, said = foretold(run, tmp_path / "first", 6)
    assert f"[rehearsal-does-not-fit] {run.moment} does not fit on a card of" in said


def test_without_being_asked_it_raises_nothing_and_the_run_goes_on(tmp_path, simgpu) -> None:
    simgpu.set_capacity(12 * MIB)
    long = [*ragged_rows(64), {"input_ids": torch.ones(250, dtype=torch.long)}]
    options = {"train_dataset": long, "trainer_class": WithoutTheLast}
    rehearsal = Rehearsal()
    rehearsed = Trained(tmp_path / "rehearsed", rehearsal, **options)
    simgpu.set_capacity(256 * MIB)
    alone = Trained(tmp_path / "alone", **options)

    (training,) = [each for each in rehearsal.report.moments if each.failure]
    assert (training.moment, training.has_run_out) == ("training", True)
    assert rehearsed.changed == []
    assert rehearsed.is_the_run(alone)


class WithoutTheLast(Trainer):
    def _get_train_sampler(self, *_):
        return range(64)


def test_survive_oom_divides_what_training_cannot(tmp_path, simgpu) -> None:
    """Also where it stands behind the rehearsal, as that of a preset does."""
    rehearsal = Rehearsal(refuse_on="error")
    trainer = make(RUNS[0], tmp_path, 6, rehearsal, SurviveOOM())
    trainer.train()

    assert trainer.state.global_step == 8
    assert "survive_oom does it" in dict(rehearsal.report.left_out)["training"]


class Streamed(IterableDataset):
    def __init__(self) -> None:
        self.num_read = 0

    def __iter__(self):
        for row in ragged_rows():
            self.num_read += 1
            yield row


def test_what_is_streamed_is_not_consumed(tmp_path, simgpu) -> None:
    rehearsal, streamed = Rehearsal(), Streamed()
    Trained(tmp_path, rehearsal, train_dataset=streamed, data_collator=padded)

    assert "Streamed cannot be asked for single rows" in dict(rehearsal.report.left_out)["training"]
    assert streamed.num_read <= 4 * 2 * 4 + 4


def test_of_a_data_set_that_can_be_streamed_anew_the_first_rows_are_looked_at(
    tmp_path, simgpu
) -> None:
    rows = {"input_ids": [row["input_ids"].tolist() for row in ragged_rows()]}
    rehearsal = Rehearsal()

    def collate(examples):
        return padded([{"input_ids": torch.tensor(row["input_ids"])} for row in examples])

    def stream():
        return Dataset.from_dict(rows).to_iterable_dataset()

    rehearsed = Trained(tmp_path / "a", rehearsal, train_dataset=stream(), data_collator=collate)
    alone = Trained(tmp_path / "b", train_dataset=stream(), data_collator=collate)

    (training,) = [each for each in rehearsal.report.moments if each.moment == "training"]
    assert "longest rows of the first 64 that come" in training.what
    assert rehearsed.is_the_run(alone)


class Fails:
    """A collator that fails on one sample."""

    def __call__(self, examples):
        if max(len(row["input_ids"]) for row in examples) > 60:
            raise KeyError("image of this row")
        return drawing(examples)


def test_bad_input_is_a_finding_and_the_run_goes_on(tmp_path, simgpu, caplog) -> None:
    long = [*ragged_rows(64), {"input_ids": torch.ones(64, dtype=torch.long)}]
    rehearsal = Rehearsal()
    options = {"train_dataset": long, "data_collator": Fails(), "trainer_class": WithoutTheLast}
    rehearsed = Trained(tmp_path / "run", rehearsal, **options)
    alone = Trained(tmp_path / "alone", **options)

    (finding, *_) = rehearsal.report.findings
    assert (finding.code, finding.severity) == ("rehearsal-fails", logging.WARNING)
    assert "KeyError: 'image of this row'" in finding.evidence
    assert rehearsed.is_the_run(alone)
    entries = read_timeline(tmp_path / "run" / "_trainer_plugins" / "memory" / "rank-0.jsonl")
    codes = [entry.finding.code for entry in entries if isinstance(entry, Remark)]
    assert codes == ["rehearsal-fails", "rehearsed"]
    with pytest.raises(RehearsalError, match="image of this row"):
        Trained(tmp_path / "refused", Rehearsal(refuse_on="warning"), **options)


class NoRoom(Trainer):
    def _save_optimizer_and_scheduler(self, output_dir):
        raise OSError(28, "No space left on device")


def test_a_save_that_fails_is_known_before_step_1(tmp_path, simgpu) -> None:
    rehearsal = Rehearsal(refuse_on="warning")
    with pytest.raises(RehearsalError, match="No space left on device"):
        Trained(tmp_path, rehearsal, trainer_class=NoRoom)
    assert [path.name for path in tmp_path.iterdir()] == ["_trainer_plugins"]


def test_what_a_run_does_not_have_is_not_rehearsed(tmp_path, simgpu) -> None:
    rehearsal = Rehearsal()
    Trained(tmp_path, rehearsal, eval_strategy="no", eval_dataset=None, save_strategy="no")
    assert [each.moment for each in rehearsal.report.moments] == ["optimizer step", "training"]


def test_where_nothing_counts_memory_it_is_seen_whether_it_works(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    rehearsal = Rehearsal()
    Trained(tmp_path, rehearsal)
    assert [(each.moment, each.peak_bytes) for each in rehearsal.report.moments] == [
        (moment, None) for moment in MOMENTS
    ]


def test_generation_takes_all_its_tokens(tmp_path, simgpu) -> None:
    rehearsal, lengths = Rehearsal(), []

    class Notes(Seq2SeqTrainer):
        def prediction_step(self, *args, **kwargs):
            found = super().prediction_step(*args, **kwargs)
            lengths.append(found[1].shape[-1])
            return found

    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_ff": 64, "d_kv": 8, "num_layers": 1, "num_heads": 4}
    model = T5ForConditionalGeneration(
        T5Config(vocab_size=128, **sizes, decoder_start_token_id=0, eos_token_id=[*range(1, 120)])
    )
    trainer = small_trainer(
        tmp_path, model, Notes, Seq2SeqTrainingArguments, use_cpu=False, eval_strategy="steps", eval_steps=2,
        predict_with_generate=True, generation_max_length=40, eval_dataset=ragged_rows(8),
        compute_metrics=lambda _: {},
    )  # fmt: skip
    trainer.add_callback(rehearsal)
    trainer.train()

    (evaluation,) = [each for each in rehearsal.report.moments if each.moment == "evaluation"]
    assert "each generating 40 tokens" in evaluation.what
    assert lengths[0] == 40


def test_the_peaks_stand_beside_those_of_a_plan(tmp_path, simgpu) -> None:
    peak = MomentPeak(allocated_bytes=3 * MIB, reserved_bytes=4 * MIB)
    plan = MemoryPlan(
        allocated_peak_bytes=0,
        reserved_peak_bytes=0,
        nvidia_smi_peak_bytes=0,
        host_ram_bytes_per_node=0,
        moment="backward",
        breakdown={},
        top_tensors=(),
        moments={"backward": peak},
    )
    rehearsal = Rehearsal(plan=plan, save=False)
    Trained(tmp_path, rehearsal)
    (line,) = [line for line in str(rehearsal.report).splitlines() if "training" in line]
    assert "planned 3.0 MiB" in line
    assert "save" not in str(rehearsal.report)


def test_a_bad_argument_is_refused() -> None:
    with pytest.raises(ValueError, match="refuse_on is error, warning or None, got 'fatal'"):
        Rehearsal(refuse_on="fatal")  # type: ignore[arg-type]


def test_completions_are_left_to_their_time(tmp_path: Path, simgpu) -> None:
    pytest.importorskip("trl")
    from tests.survival.test_trl import grpo

    rehearsal = Rehearsal()
    trainer = grpo(tmp_path, use_cpu=False)
    trainer.add_callback(rehearsal)
    trainer.train()
    assert rehearsal.report.left_out == (("the run", "the length of completions is not known yet"),)
