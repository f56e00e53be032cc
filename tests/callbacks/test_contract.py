"""What every callback promises, whatever it does, wherever it runs."""

import copy
import pickle

import pytest
import torch
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainerCallback, TrainingArguments

from tests.models import token_rows
from trainer_plugins import CudaCacheCallback, EvalGenerateCleanup, KVCacheGuard, MemoryWatchdog
from trainer_plugins.timeline import Sample, read_timeline

CLASSES = [CudaCacheCallback, EvalGenerateCleanup, KVCacheGuard, MemoryWatchdog]


def all_four():
    return [callback() for callback in CLASSES]


@pytest.mark.parametrize("callback_class", CLASSES)
def test_survives_a_whole_run_twice(callback_class, make_trainer, anywhere) -> None:
    trainer = make_trainer(callback_class(), eval_strategy="steps", eval_steps=4, eval_on_start=True)

    trainer.train()
    trainer.train()

    assert trainer.args.device.type == anywhere
    assert trainer.state.global_step == 8


@pytest.mark.parametrize(
    ("trainer_class", "args_class", "more"),
    [(Trainer, TrainingArguments, {}), (Seq2SeqTrainer, Seq2SeqTrainingArguments, {"predict_with_generate": True})],
    ids=["Trainer", "Seq2SeqTrainer"],
)
def test_all_four_through_evaluation_prediction_save_and_resume(
    make_trainer, anywhere, tmp_path, trainer_class, args_class, more
) -> None:
    settings = {
        "trainer_class": trainer_class,
        "args_class": args_class,
        "eval_strategy": "steps",
        "eval_steps": 4,
        "save_strategy": "steps",
        "save_steps": 4,
        "gradient_checkpointing": True,
        **more,
    }
    first = make_trainer(*all_four(), **settings, max_steps=4)
    first.train()
    resumed = make_trainer(*all_four(), **settings)
    resumed.train(resume_from_checkpoint=True)
    resumed.predict(token_rows(2))

    assert resumed.state.global_step == 8
    assert next(resumed.model.parameters()).device.type == anywhere
    entries = read_timeline(tmp_path / "run" / "memory" / "rank-0.jsonl")
    steps = [entry.step for entry in entries if isinstance(entry, Sample) and entry.moment == "train"]
    assert steps == [1, 2, 3, 4, 5, 6, 7, 8]  # the resumed run went on in the file of the first
    assert {entry.moment for entry in entries if isinstance(entry, Sample)} == {
        "begin", "train", "eval", "save", "predict", "end",
    }  # fmt: skip


def test_training_is_the_same_with_and_without(make_trainer, anywhere) -> None:
    def weights(*callbacks):
        trainer = make_trainer(*callbacks, eval_strategy="steps", eval_steps=2, gradient_checkpointing=True)
        trainer.train()
        return [parameter.detach().cpu() for parameter in trainer.model.parameters()]

    for ours, bare in zip(weights(*all_four()), weights(), strict=True):
        assert torch.equal(ours, bare)


def test_the_metrics_of_the_user_stay_the_users(make_trainer) -> None:
    def keys(*callbacks):
        trainer = make_trainer(*callbacks, eval_strategy="steps", eval_steps=4)
        return set(trainer.train().metrics), set(trainer.evaluate())

    assert keys(*all_four()) == keys()


@pytest.mark.parametrize("callback_class", CLASSES)
def test_a_callback_added_twice_says_so_and_acts_once(callback_class, make_trainer, caplog, anywhere) -> None:
    make_trainer(callback_class(), callback_class()).train()

    said = [record.message for record in caplog.records if record.name.startswith("trainer_plugins")]
    assert said == [f"{callback_class.__name__} was added twice: the second one does nothing. Remove one"]


def test_a_callback_added_late_works_all_the_same(make_trainer, tmp_path) -> None:
    trainer = make_trainer()
    trainer.add_callback(MemoryWatchdog)
    trainer.train()

    assert len(read_timeline(tmp_path / "run" / "memory" / "rank-0.jsonl")) == 10


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CudaCacheCallback(interval=0), "interval counts optimizer steps, 1 or more, got 0"),
        (lambda: CudaCacheCallback(min_reclaimable_fraction=1.5), "a share of the card, 0 to 1, got 1.5"),
        (lambda: CudaCacheCallback(min_reclaimable_fraction=-0.1), "a share of the card, 0 to 1, got -0.1"),
        (lambda: MemoryWatchdog(every_steps=0), "every_steps counts optimizer steps, 1 or more, got 0"),
        (lambda: MemoryWatchdog(warn_fraction=0.9, act_fraction=0.5), "got warn_fraction=0.9, act_fraction=0.5"),
        (lambda: MemoryWatchdog(warn_fraction=0.0), "0 < warn_fraction <= act_fraction <= 1"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_device_that_cannot_be_read_is_said_and_harms_nothing(make_trainer, monkeypatch, caplog) -> None:
    trainer = make_trainer(*all_four())
    # As on a TPU or Apple's GPU, which the Trainer runs on and torch.accelerator does not count.
    monkeypatch.setattr(type(trainer.args), "device", property(lambda self: torch.device("mps")))
    try:
        trainer.callback_handler.on_train_begin(trainer.args, trainer.state, trainer.control)
    finally:
        monkeypatch.undo()
    said = [record.message for record in caplog.records if record.name.startswith("trainer_plugins")]

    assert len(said) == 3  # KVCacheGuard needs no device
    assert all("does nothing in this run: cannot read the memory of mps" in message for message in said)


def test_a_model_in_training_can_be_copied_and_pickled(make_trainer) -> None:
    copies = []

    class Copying(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            copies.append(copy.deepcopy(kwargs["model"]))
            copies.append(pickle.loads(pickle.dumps(kwargs["model"])))

    make_trainer(EvalGenerateCleanup(), KVCacheGuard(), Copying(), max_steps=1).train()

    prompt = torch.tensor([[1, 2, 3]])
    texts = [c.eval().generate(prompt, max_new_tokens=4, do_sample=False).tolist() for c in copies]
    assert texts[0] == texts[1]
    assert copies[0] is not copies[1]
