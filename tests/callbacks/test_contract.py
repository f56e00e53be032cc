"""What every callback promises, whatever it does, wherever it runs."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from transformers import (
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import trainer_plugins
from tests.events import at
from tests.models import token_rows
from tests.written import read_entries, read_steps
from trainer_plugins import (
    CudaCacheCallback,
    EvalGenerateCleanup,
    EvaluationGuard,
    Headroom,
    KVCacheGuard,
    MemoryWatchdog,
    Preflight,
    SurviveOOM,
    protect,
)
from trainer_plugins.record.timeline import Sample, Timeline

PUBLIC = [getattr(trainer_plugins, name) for name in trainer_plugins.__all__]
CLASSES = [
    thing for thing in PUBLIC if isinstance(thing, type) and issubclass(thing, TrainerCallback)
]
READING = [CudaCacheCallback, EvalGenerateCleanup, MemoryWatchdog]
TWICE = "{} was added twice: the second one has no effect. Remove one"
COPIED = ((SurviveOOM, "simgpu"),)
"""The one that changes most; the others wait for a turn of `--all`."""


def all_of_them():
    return [callback() for callback in CLASSES]


def said_by_ours(caplog) -> list[str]:
    """All but that these runs have no frozen base, which `StreamBase` says."""
    return [
        record.message
        for record in caplog.records
        if record.name.startswith("trainer_plugins")
        and "none of its 2 layers has frozen weights" not in record.message
    ]


def test_the_list_is_what_the_package_offers() -> None:
    assert len(CLASSES) >= 6
    assert set(READING) < set(CLASSES)


@pytest.mark.parametrize("callback_class", CLASSES)
@pytest.mark.all(but=8)
def test_survives_a_whole_run_twice(callback_class, make_trainer, anywhere) -> None:
    trainer = make_trainer(
        callback_class(), eval_strategy="steps", eval_steps=4, eval_on_start=True
    )

    trainer.train()
    trainer.train()

    assert trainer.args.device.type == anywhere
    assert trainer.state.global_step == 8


@pytest.mark.parametrize(
    ("trainer_class", "args_class", "more"),
    [
        (Trainer, TrainingArguments, {}),
        (Seq2SeqTrainer, Seq2SeqTrainingArguments, {"predict_with_generate": True}),
    ],
    ids=["Trainer", "Seq2SeqTrainer"],
)
def test_all_through_evaluation_prediction_save_and_resume(
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
    first = make_trainer(*all_of_them(), **settings, max_steps=4)
    first.train()
    resumed = make_trainer(*all_of_them(), **settings)
    resumed.train(resume_from_checkpoint=True)
    resumed.predict(token_rows(2))

    assert resumed.state.global_step == 8
    assert next(resumed.model.parameters()).device.type == anywhere
    run = tmp_path / "run"
    assert read_steps(run) == [*range(1, 9)]  # the resumed run went on in the first's file
    assert {entry.moment for entry in read_entries(run, Sample)} == {
        "begin", "train", "eval", "save", "predict", "end",
    }  # fmt: skip


def test_training_is_the_same_with_and_without(make_trainer, anywhere) -> None:
    def weights(*callbacks):
        trainer = make_trainer(
            *callbacks, eval_strategy="steps", eval_steps=2, gradient_checkpointing=True
        )
        trainer.train()
        return [parameter.detach().cpu() for parameter in trainer.model.parameters()]

    for ours, bare in zip(weights(*all_of_them()), weights(), strict=True):
        assert torch.equal(ours, bare)


def test_the_metrics_of_the_user_stay_the_users(make_trainer) -> None:
    def keys(*callbacks):
        trainer = make_trainer(*callbacks, eval_strategy="steps", eval_steps=4)
        return set(trainer.train().metrics), set(trainer.evaluate())

    assert keys(*all_of_them()) == keys()


@pytest.mark.parametrize("is_same", [True, False])
@pytest.mark.parametrize("callback_class", CLASSES)
def test_a_callback_given_twice_says_so_and_acts_once(
    callback_class, is_same: bool, make_trainer, caplog, tmp_path, anywhere
) -> None:
    callback, steps = callback_class(), []
    second = callback if is_same else callback_class()
    last = at("step_end", lambda now: steps.append(now.state.global_step))
    make_trainer(callback, second, last).train()

    assert said_by_ours(caplog) == [TWICE.format(callback_class.__name__)]
    assert steps == [1, 2, 3, 4, 5, 6, 7, 8]  # no event of another callback was skipped
    if callback_class is MemoryWatchdog:
        assert len(read_entries(tmp_path / "run")) == 10


def test_it_acts_once_in_an_evaluation_without_training_too(make_trainer) -> None:
    timeline = Timeline()
    watchdog = MemoryWatchdog(timeline=timeline)
    for second in watchdog, MemoryWatchdog(timeline=timeline), copy.copy(watchdog):
        before = timeline.num_added
        make_trainer(watchdog, second).evaluate()
        assert timeline.num_added == before + 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: CudaCacheCallback(interval=0),
            "interval is a number of optimizer steps, 1 or more, got 0",
        ),
        (
            lambda: CudaCacheCallback(min_reclaimable_fraction=1.5),
            "a fraction of the card, 0 to 1, got 1.5",
        ),
        (
            lambda: CudaCacheCallback(min_reclaimable_fraction=-0.1),
            "a fraction of the card, 0 to 1, got -0.1",
        ),
        (
            lambda: MemoryWatchdog(every_steps=0),
            "every_steps is a number of optimizer steps, 1 or more, got 0",
        ),
        (
            lambda: EvaluationGuard("disk"),  # type: ignore[arg-type]
            "logits_to is cpu, argmax or None, got 'disk'",
        ),
        (lambda: Headroom(1.0), "leave_fraction is a part of the card, 0 to 1, got 1.0"),
        (
            lambda: Preflight("never"),  # type: ignore[arg-type]
            "refuse_on is error, warning or None, got 'never'",
        ),
        (
            lambda: MemoryWatchdog(warn_fraction=0.9, act_fraction=0.5),
            "got warn_fraction=0.9, act_fraction=0.5",
        ),
        (lambda: MemoryWatchdog(warn_fraction=0.0), "0 < warn_fraction <= act_fraction <= 1"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_device_that_cannot_be_read_is_said_and_harms_nothing(
    make_trainer, monkeypatch, caplog
) -> None:
    trainer = make_trainer(*(callback() for callback in READING), KVCacheGuard())
    # As on a TPU or Apple's GPU, which the Trainer runs on and torch.accelerator does not count.
    monkeypatch.setattr(type(trainer.args), "device", property(lambda self: torch.device("mps")))
    try:
        trainer.callback_handler.on_train_begin(trainer.args, trainer.state, trainer.control)
    finally:
        monkeypatch.undo()
    said = said_by_ours(caplog)

    assert len(said) == 3  # KVCacheGuard needs no device
    assert all(
        "does nothing in this run: cannot read the memory of mps" in message for message in said
    )


def test_a_model_in_training_can_be_copied_and_pickled(make_trainer) -> None:
    copies: list = []

    def take_copies(now) -> None:
        copies.extend((copy.deepcopy(now.model), pickle.loads(pickle.dumps(now.model))))

    callbacks = (EvalGenerateCleanup(), KVCacheGuard(), at("step_end", take_copies))
    make_trainer(*callbacks, max_steps=1).train()

    prompt = torch.tensor([[1, 2, 3]])
    texts = [c.eval().generate(prompt, max_new_tokens=4, do_sample=False).tolist() for c in copies]
    assert texts[0] == texts[1]
    assert copies[0] is not copies[1]


@pytest.mark.all(unless=lambda callback_class: callback_class in (MemoryWatchdog, SurviveOOM))
@pytest.mark.parametrize("callback_class", CLASSES)
def test_a_training_that_raised_keeps_no_model(callback_class, make_trainer) -> None:
    def breaks(_) -> None:
        raise LookupError("what somebody else's callback raises ends the training")

    trainer = make_trainer(callback_class(), at("step_end", breaks))
    with pytest.raises(LookupError):
        trainer.train()

    model = weakref.ref(trainer.model)
    del trainer
    gc.unfreeze()
    gc.collect()
    assert model() is None


class CopiesItsTrainer(TrainerCallback):
    """Copies its Trainer in the middle of training, and sends each other callback through pickle and back."""

    def __init__(self) -> None:
        self.trainers: list[Trainer] = []
        self.copies: list[Trainer] = []

    def on_step_end(self, args, state, control, **kwargs):
        if self.trainers and state.global_step in (1, 8):
            trainers, self.trainers = self.trainers, []
            self.copies.append(copy.deepcopy(trainers[0]))
            self.trainers = trainers
            for callback in trainers[0].callback_handler.callbacks:
                if type(callback) in CLASSES:
                    assert type(pickle.loads(pickle.dumps(callback))) is type(callback)


@pytest.mark.all(unless=lambda callback_class, anywhere: (callback_class, anywhere) in COPIED)
@pytest.mark.parametrize("callback_class", CLASSES)
def test_a_trainer_can_be_copied_before_in_and_after_training(
    callback_class, make_trainer, anywhere, caplog
) -> None:
    copying = CopiesItsTrainer()
    trainer = make_trainer(callback_class(), copying, eval_strategy="steps", eval_steps=4)
    early = copy.deepcopy(trainer)
    copying.trainers.append(trainer)
    trainer.train()
    copying.trainers.clear()
    late = copy.deepcopy(trainer)

    assert len(copying.copies) == 2
    for twin in (early, *copying.copies, late):
        twin.evaluate()
        assert twin.train().global_step == 8
        prompt = torch.tensor([[1, 2, 3]], device=twin.args.device)
        assert twin.model.generate(prompt, max_new_tokens=2).shape == (1, 5)
    if callback_class is not SurviveOOM:  # which may say why it cannot help a copy
        assert said_by_ours(caplog) == []


def test_a_copied_trainer_is_watched_too(make_trainer, tmp_path) -> None:
    trainer = make_trainer(MemoryWatchdog())
    trainer.train()
    copy.deepcopy(trainer).evaluate()

    assert [each.moment for each in read_entries(tmp_path / "run", Sample)][-2:] == ["end", "eval"]


ERRORS = [
    RuntimeError("CUDA error"),
    OSError(5, "Input/output error"),
    ValueError("no"),
    KeyError("allocated_bytes"),
]


@pytest.mark.all(
    unless=lambda callback_class, fails_from: fails_from == 2 and callback_class is MemoryWatchdog
)
@pytest.mark.parametrize(
    "callback_class", [one for one in CLASSES if one is not SurviveOOM]
)  # tests/survival has its own
@pytest.mark.parametrize("fails_from", [0, 2])
def test_a_reading_that_fails_ends_no_training(
    callback_class, fails_from, make_trainer, simgpu, monkeypatch, caplog, tmp_path
) -> None:
    """The card's counters fail, from before training or in its middle, in whatever event they are asked for."""
    stats = torch._C._accelerator_getDeviceStats
    failing: list[Exception] = []

    def fail_or_tell(index):
        if failing:
            raise type(failing[0])(
                *failing[0].args
            )  # anew: raised again, one would keep the frames of every time
        return stats(index)

    monkeypatch.setattr(torch._C, "_accelerator_getDeviceStats", fail_or_tell)
    torch.ones(1, device="simgpu")  # torch has counters from its first allocation on
    for number, error in enumerate(ERRORS):
        caplog.clear()
        failing[:] = [error] * (not fails_from)
        options = (
            {"stop": True, "prometheus_dir": tmp_path} if callback_class is MemoryWatchdog else {}
        )
        options |= {"interval": 1} if callback_class is CudaCacheCallback else {}
        settings = {
            "eval_strategy": "steps",
            "eval_steps": 2,
            "save_strategy": "steps",
            "save_steps": 3,
            "max_steps": 4,
        }
        trainer = make_trainer(
            at("step_begin", lambda _: failing.append(error), fails_from),  # noqa: B023 - used up in the loop
            callback_class(**options), **settings, logging_strategy="steps", logging_steps=1,
            output_dir=str(tmp_path / str(number)),
        )  # fmt: skip
        trainer.train()
        trainer.predict(token_rows(2))

        assert trainer.state.global_step == 4
        said = said_by_ours(caplog)
        reads = callback_class in (*READING, EvaluationGuard) or (
            callback_class is Preflight and not fails_from
        )
        assert len(said) == reads, (error, said)
        assert all(
            "training continues" in message
            or "training goes on" in message
            or "does nothing in this run" in message
            for message in said
        )
        failing.clear()


def test_a_trainer_whose_events_pass_no_model_is_one_line(make_trainer, caplog) -> None:
    """setfit's handler passes its own model, which holds a module and is none."""

    class SetFitModel:
        pass

    for _ in range(2):
        trainer = make_trainer(max_steps=2, eval_strategy="steps", eval_steps=1)
        protect(trainer, "survive")

        def pass_it(_, handler=trainer.callback_handler) -> None:
            handler.model = SetFitModel()

        trainer.callback_handler.callbacks.insert(0, at("train_begin", pass_it))
        trainer.train()

    (told,) = [one for one in caplog.records if "SetFitModel" in one.getMessage()]
    assert "is not an nn.Module" in told.getMessage()
    assert not [one for one in caplog.records if one.exc_info]
    assert trainer.state.global_step == 2
