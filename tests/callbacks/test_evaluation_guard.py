"""An evaluation whose outputs do not fit is forecast at its first batch, and fits where that was asked for."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers import EvalPrediction, Trainer

from tests.check.test_planted import Endless
from tests.events import at
from tests.models import tiny_llama, token_rows
from trainer_plugins import EvaluationGuard
from trainer_plugins.finding import Finding, Severity
from trainer_plugins.record.timeline import Remark, Timeline
from trainer_plugins.units import MIB


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    """As tutorials write it: it takes logits, and changes labels in place."""
    logits, labels = prediction
    words = np.argmax(logits, axis=-1)[:, :-1]
    labels = labels[:, 1:]
    labels[labels == -100] = 0
    return {"accuracy": float((words == labels).mean()), "sum": float(words.sum())}


def perplexity(prediction: EvalPrediction) -> dict[str, float]:
    """It needs all logits."""
    logits: Any = prediction.predictions
    largest = logits.max(-1, keepdims=True)
    return {"mean": float((largest + np.log(np.exp(logits - largest).sum(-1))).mean())}


def evaluate(make_trainer, *callbacks, metrics: Any = accuracy, **settings: Any) -> dict[str, Any]:
    """Evaluates 32 rows of 32 tokens and 32,000 words: 125 MiB of logits, which are joined in 250."""
    trainer = make_trainer(*callbacks, model=tiny_llama(vocab_size=32_000), **settings)
    trainer.eval_dataset, trainer.compute_metrics = token_rows(32), metrics
    torch.accelerator.reset_peak_memory_stats()
    found: dict[str, Any] = trainer.evaluate()
    found = {name: value for name, value in found.items() if "per_second" not in name}
    for name in ("eval_runtime", "eval_model_preparation_time"):
        del found[name]
    assert trainer.preprocess_logits_for_metrics is None
    assert trainer.compute_metrics is metrics
    assert trainer.args.eval_accumulation_steps is settings.get("eval_accumulation_steps")
    return found


def said(timeline: Timeline) -> list[Finding]:
    return [entry.finding for entry in timeline if isinstance(entry, Remark)]


@pytest.mark.parametrize("metrics", [accuracy, perplexity])
def test_an_evaluation_that_dies_is_forecast_and_lives_with_the_same_metrics(
    make_trainer, simgpu, caplog, metrics
) -> None:
    timeline = Timeline()
    with pytest.raises(torch.OutOfMemoryError):
        evaluate(make_trainer, EvaluationGuard(timeline=timeline), metrics=metrics)
    (finding,) = said(timeline)
    assert (finding.code, finding.severity) == ("evaluation-gathers-logits", Severity.ERROR)
    assert "an evaluation needs 250.0 MiB for its outputs at its end, but" in finding.summary
    assert "4 batches of 31.2 MiB" in finding.evidence

    simgpu.set_capacity(1024 * MIB)
    bare = evaluate(make_trainer, metrics=metrics)
    assert torch.accelerator.max_memory_allocated() > 250 * MIB
    torch.accelerator.empty_cache()

    simgpu.set_capacity(256 * MIB)
    for place in ("cpu", "argmax"):
        caplog.clear()
        guard = EvaluationGuard(logits_to=place, timeline=(timeline := Timeline()))
        assert evaluate(make_trainer, guard, metrics=metrics) == bare
        assert said(timeline) == []
        refused = [record.message for record in caplog.records if "their argmax" in record.message]
        assert len(refused) == (place == "argmax" and metrics is perplexity)
        assert all("compute_metrics raises" in message for message in refused)
        torch.accelerator.empty_cache()


def test_an_argmax_is_kept_in_place_of_the_logits(make_trainer, simgpu) -> None:
    """With the outputs of one batch on the card at a time, and labels; in every evaluation of a training."""
    taken: list[Any] = []

    def watched(prediction: EvalPrediction) -> dict[str, float]:
        taken.append(prediction.predictions)
        return accuracy(prediction)

    trainer = make_trainer(
        EvaluationGuard(logits_to="argmax"), model=tiny_llama(vocab_size=32_000),
        eval_strategy="steps", eval_steps=4,
    )  # fmt: skip
    trainer.eval_dataset, trainer.compute_metrics = token_rows(32), watched
    trainer.train()

    assert [type(each).__name__ for each in taken] == ["ndarray", "Argmaxed", "Argmaxed"] * 2
    assert taken[2].shape == (32, 32, 32_000)
    assert trainer.predict(token_rows(2)).predictions.shape == (2, 32, 32_000)


def test_what_fits_is_left_alone(make_trainer, simgpu, caplog) -> None:
    """Also a Trainer that moves outputs by itself, and one that keeps only the loss."""
    calls: list[int] = []

    def counted(prediction: EvalPrediction) -> dict[str, float]:
        calls.append(1)
        return accuracy(prediction)

    timeline = Timeline()
    guard = EvaluationGuard(logits_to="argmax", timeline=timeline)
    simgpu.set_capacity(2048 * MIB)
    evaluate(make_trainer, guard, metrics=counted)
    evaluate(make_trainer, guard, metrics=counted, eval_accumulation_steps=2)
    evaluate(make_trainer, guard, metrics=None)
    assert (len(calls), said(timeline)) == (2, [])
    assert not [record for record in caplog.records if record.name.startswith("trainer_plugins")]


class Padded(Trainer):
    """Batches differ in length, as those of a collator that pads to its longest."""

    def prediction_step(self, model, inputs, *args, **kwargs):
        length = 32 if len(self.seen) else 16
        self.seen.append(length)
        inputs = {name: value[:, :length] for name, value in inputs.items()}
        return super().prediction_step(model, inputs, *args, **kwargs)


def test_rows_of_other_lengths_are_padded_as_logits_are(make_trainer, simgpu) -> None:
    def results(*callbacks):
        simgpu.set_capacity((256 if callbacks else 1024) * MIB)
        Padded.seen = []
        found = evaluate(make_trainer, *callbacks, trainer_class=Padded)
        torch.accelerator.empty_cache()
        return found

    bare = results()
    assert results(EvaluationGuard(logits_to="argmax")) == bare
    assert results(EvaluationGuard(logits_to="cpu")) == bare


def test_what_the_users_own_preprocessing_keeps_is_what_counts(make_trainer, simgpu) -> None:
    trainer = make_trainer(
        EvaluationGuard(timeline=(timeline := Timeline())), model=tiny_llama(vocab_size=32_000)
    )
    trainer.eval_dataset = token_rows(32)
    trainer.compute_metrics = lambda prediction: {"shape": prediction.predictions.shape[-1]}
    theirs = trainer.preprocess_logits_for_metrics = lambda logits, labels: logits.argmax(-1)

    assert trainer.evaluate()["eval_shape"] == 32
    assert said(timeline) == []
    assert trainer.preprocess_logits_for_metrics is theirs


def test_main_memory_that_is_short_too_is_said_at_the_first_batch(make_trainer, simgpu) -> None:
    """What was changed is put back, although the prediction raises."""

    def stop(_) -> None:
        raise LookupError("seen enough")

    timeline = Timeline()
    trainer = make_trainer(
        EvaluationGuard(logits_to="cpu", timeline=timeline), at("prediction_step", stop)
    )
    with pytest.raises(LookupError):
        trainer.predict(Endless())
    (finding,) = said(timeline)
    assert "but main memory has" in finding.summary
    assert finding.severity is Severity.ERROR
    assert trainer.args.eval_accumulation_steps is trainer.preprocess_logits_for_metrics is None
