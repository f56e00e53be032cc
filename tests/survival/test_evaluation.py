"""An evaluation batch that does not fit is computed in parts: same loss, same metrics, same predictions."""

import gc
import re

import pytest
import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer

from tests.models import tiny_llama, tiny_t5
from tests.survival.failing import Allocations, packed, padded, ragged_rows, small_trainer
from tests.survival.test_again import classifier
from tests.survival.test_attach import remarks
from trainer_plugins import MemoryWatchdog, draw, survive_oom
from trainer_plugins.units import MIB


def classes(rows):
    return {
        "input_ids": torch.stack([row["input_ids"][:6] for row in rows]),
        "labels": torch.arange(len(rows)) % 3,
    }


def without_cache():
    """With one, transformers before 5 lets packed sequences look at each other."""
    return tiny_llama(use_cache=False).double()


FAMILIES: dict[str, dict] = {
    "causal": {"keeps_cache": True},
    "label smoothing": {"label_smoothing_factor": 0.1},
    "sequence classification": {"make_model": classifier, "data_collator": classes},
    "packed": {"data_collator": packed, "make_model": without_cache},
}


def evaluate(trainer, fail_at: tuple[int, ...], **options):
    """What 20 rows give, but times, and the number of allocations."""
    trainer.eval_dataset = ragged_rows(20)
    if fail_at:
        survive_oom(trainer, vouch_for_loss=True)  # of the hook of one of them
    with Allocations() as allocations:
        allocations.begin(list(fail_at))
        metrics = trainer.evaluate(**options)
    assert allocations.num_failed == len(fail_at)
    told = ("runtime", "per_second", "preparation_time")
    return {
        name: value for name, value in metrics.items() if not name.endswith(told)
    }, allocations.num


def evaluated(
    tmp_path,
    fail_at: tuple[int, ...] = (),
    with_metrics=False,
    make_model=None,
    keeps_cache=False,
    **kwargs,
):
    """Loss and metrics, all predictions, and the number of allocations."""
    seen = []

    def keep(predictions):
        seen.append(torch.as_tensor(predictions.predictions))
        seen.append(torch.as_tensor(predictions.label_ids))
        return {"sum": float(predictions.predictions.sum())}

    trainer = small_trainer(
        tmp_path,
        (make_model or (lambda: tiny_llama().double()))(),
        compute_metrics=keep if with_metrics else None,
        **{"per_device_eval_batch_size": 8, **kwargs},
    )
    trainer.model.config.use_cache = keeps_cache
    metrics, num = evaluate(trainer, fail_at)
    return metrics, seen, num


@pytest.mark.parametrize("with_metrics", [False, True], ids=["loss only", "metrics"])
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_metrics_and_predictions_are_those_of_the_whole(
    tmp_path, family: str, with_metrics: bool
) -> None:
    options = FAMILIES[family]
    expected, predictions, num = evaluated(tmp_path / "whole", (), with_metrics, **options)
    *_, num_in_parts = evaluated(tmp_path / "once", (num // 6,), with_metrics, **options)
    # In the first of three batches, and in a part of one of those that are divided beforehand.
    fail_at = (
        num // 6,
        num_in_parts - num // 2,
    )  # the last batch is a third of the allocations, and not divided
    metrics, small_predictions, _ = evaluated(tmp_path / "parts", fail_at, with_metrics, **options)

    assert metrics == pytest.approx(expected, rel=1e-6, abs=1e-9)
    for ours, theirs in zip(small_predictions, predictions, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
    first, second = remarks(tmp_path / "parts", "out-of-memory-survived")
    assert first.finding.summary.startswith("an evaluation batch of 8 ")
    assert second.finding.summary.startswith("an evaluation batch of ")


def generated(tmp_path, fail_at: tuple[int, ...] = (), **options):
    """Loss and metrics, tokens and labels, and the number of allocations of an evaluation that generates."""
    seen = []

    def keep(predictions):
        seen.extend([predictions.predictions, predictions.label_ids])
        return {"sum": float(predictions.predictions.sum())}

    model = tiny_t5().double()
    with torch.no_grad():
        for parameter in model.parameters():  # so that rows do not all generate the same
            parameter.add_(torch.randn_like(parameter) * 0.3)
    trainer = small_trainer(
        tmp_path,
        model,
        compute_metrics=keep,
        trainer_class=Seq2SeqTrainer,
        args_class=Seq2SeqTrainingArguments,
        per_device_eval_batch_size=8,
        predict_with_generate=True,
        **options,
    )
    metrics, num = evaluate(trainer, fail_at, max_new_tokens=12)
    return metrics, seen, num


@pytest.mark.parametrize("options", [{}, {"generation_num_beams": 3}], ids=["greedy", "beams"])
@pytest.mark.all(but=1)
def test_what_is_generated_is_what_the_whole_would_have_been(tmp_path, options) -> None:
    expected, (tokens, labels), num = generated(tmp_path / "whole", **options)
    # While it generates, a part of it again, and in the forward pass for the loss of a later batch.
    metrics, (small_tokens, small_labels), _ = generated(
        tmp_path / "parts", (num // 9, num // 5, num), **options
    )

    assert metrics == pytest.approx(expected, rel=1e-6)
    assert (small_tokens == tokens).all()
    assert len({tuple(row) for row in tokens.tolist()}) > 10, "rows generate different tokens"
    assert (small_labels == labels).all()
    first, *_ = remarks(tmp_path / "parts", "out-of-memory-survived")
    assert "8 rows to generate from did not fit" in first.finding.summary


def test_one_row_that_does_not_fit_ends_it_with_the_words_of_the_error(tmp_path) -> None:
    with pytest.raises(
        torch.OutOfMemoryError,
        match=r"(?s)CUDA out of memory.*nothing smaller to try than one example",
    ):
        evaluated(tmp_path, (30,), per_device_eval_batch_size=1)


def test_one_sequence_that_is_longer_than_the_limit_is_computed_as_it_is(tmp_path) -> None:
    """Which does not lie as those do by which the limit was found: nothing was measured of it."""

    def loss(fail_at: list[int]) -> float:
        trainer = small_trainer(
            tmp_path, without_cache(), data_collator=packed, per_device_eval_batch_size=8
        )
        trainer.eval_dataset = [*ragged_rows(16), {"input_ids": torch.arange(1, 81)}]
        if fail_at:
            survive_oom(trainer)
        with Allocations() as allocations:
            allocations.begin(fail_at)
            return trainer.evaluate()["eval_loss"]

    assert loss([60]) == pytest.approx(loss([]), rel=1e-6)
    assert len(remarks(tmp_path, "out-of-memory-survived")) == 1


def test_a_loss_that_is_asked_for_otherwise_is_weighed_otherwise(tmp_path) -> None:
    """The Trainer gives the number of tokens by which a loss is divided.

    Without it a loss is a mean.
    """
    trainer = small_trainer(tmp_path, per_device_eval_batch_size=8)
    trainer.eval_dataset = ragged_rows(8)

    def mean() -> float:
        with torch.no_grad():
            loss, outputs = trainer.compute_loss(
                trainer.model.eval(), padded(ragged_rows(8)), return_outputs=True
            )
        assert len(outputs.logits) == 8
        return float(loss)

    expected = mean()
    survive_oom(trainer)
    with Allocations() as allocations:
        allocations.begin([60])
        trainer.evaluate()
    assert mean() == pytest.approx(expected, rel=1e-6)
    assert allocations.num_failed == 1


def test_what_trl_counts_is_counted_once(tmp_path) -> None:
    """It fails at the end of the first batch, and, after nine passes that measure, at the end of its second part."""
    pytest.importorskip("trl")
    from tests.survival.test_trl import sft

    def metrics(fail_after: int) -> tuple[dict[str, float], int]:
        trainer, begun, fail_in = sft(tmp_path), [], (1, 12) if fail_after else ()
        trainer.model.lm_head.weight.data.mul_(30)  # for entropies that differ from part to part
        nums, compute_loss = [], trainer.compute_loss
        with Allocations() as allocations:

            def fail(module, _) -> None:
                if module is not trainer.model:
                    return
                begun.append(allocations.num)
                if len(begun) in fail_in:
                    allocations.fail_at = [allocations.num + fail_after]

            def counted(*args, **kwargs):  # without the next batch, for which tensors are made too
                result = compute_loss(*args, **kwargs)
                nums.append(allocations.num - begun[-1])
                return result

            if fail_after:
                survive_oom(trainer)
            else:
                trainer.compute_loss = counted
            with register_module_forward_pre_hook(fail):  # none of the model, which is measured
                told = trainer.evaluate(trainer.train_dataset)
        assert allocations.num_failed == len(fail_in)
        logged = trainer.state.log_history[-1] | told
        numbers = {
            n: v for n, v in logged.items() if not n.endswith(("time", "per_second", "survived"))
        }
        return numbers, min(nums, default=0)

    expected, num = metrics(0)
    assert metrics(num)[0] == pytest.approx(expected, rel=1e-5)


class Measures(Trainer):
    """Takes its own metrics from the outputs, and notes what it has seen."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.seen: list[int] = []
        self.sums: list[float] = []

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        self.seen.extend(inputs["input_ids"][:, 0].tolist())
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        loss, logits, _ = super().prediction_step(model, inputs, False, ignore_keys)
        self.sums.append(float(logits.sum()))
        return loss, None, None


def test_what_a_trainer_of_your_own_sees_in_an_evaluation_is_what_it_would_have_seen(
    tmp_path,
) -> None:
    """The first batch fails whole, and then, after six passes that measure, its second part."""

    def measured(*fail_in: int) -> Measures:
        trainer = small_trainer(tmp_path, trainer_class=Measures, per_device_eval_batch_size=8)
        num = 0

        def fail(module, _) -> None:
            nonlocal num
            num += module is trainer.model
            if module is trainer.model and num in fail_in:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")

        if fail_in:
            survive_oom(trainer)
        with register_module_forward_pre_hook(fail):
            trainer.evaluate(ragged_rows(20))
        return trainer

    expected, trainer = measured(), measured(1, 9)
    (told,) = remarks(tmp_path, "out-of-memory-survived")
    assert told.finding.summary.endswith("computed in 3 parts")
    assert told.finding.evidence.startswith("failed attempts: 2")
    assert trainer.seen == expected.seen
    assert trainer.sums == pytest.approx(expected.sums)


def test_outputs_that_have_no_rows_are_not_put_together_wrongly(tmp_path) -> None:
    def summed():
        model = tiny_llama().double()
        model.register_forward_hook(
            lambda module, inputs, outputs: {**outputs, "logits": outputs.logits.sum()}
        )
        return model

    with pytest.raises(
        torch.OutOfMemoryError,
        match="returns a value that is no tensor with one row per example",
    ):
        evaluated(tmp_path, (100,), True, summed)


def test_on_a_card_that_is_too_small(tmp_path, simgpu) -> None:
    def loss_on(capacity_mib: int) -> float:
        gc.collect()
        torch.accelerator.empty_cache()
        simgpu.set_capacity(capacity_mib * MIB)
        model = tiny_llama(vocab_size=512)
        trainer = small_trainer(
            tmp_path / str(capacity_mib), model, use_cpu=False, per_device_eval_batch_size=32
        )
        trainer.eval_dataset = ragged_rows()
        if capacity_mib < 256:
            survive_oom(trainer)
        return trainer.evaluate()["eval_loss"]

    assert loss_on(3) == pytest.approx(loss_on(256), rel=1e-5)
    (told,) = remarks(tmp_path / "3", "out-of-memory-survived")
    assert "did not fit, and was computed in" in told.finding.summary


def test_what_survival_tried_is_no_fragmentation_and_its_advice_is_what_fits(
    tmp_path, simgpu
) -> None:
    simgpu.set_capacity(8 * MIB)
    trainer = small_trainer(
        tmp_path,
        tiny_llama(vocab_size=1024),
        steps=14,
        use_cpu=False,
        per_device_eval_batch_size=64,
        eval_strategy="steps",
        eval_steps=7,
        eval_dataset=ragged_rows(),
    )
    trainer.add_callback(MemoryWatchdog())
    survive_oom(trainer)
    trainer.train()

    first, *_ = told = remarks(tmp_path, "out-of-memory-survived")
    (num_parts,) = re.findall(r"computed in (\d+) parts", first.finding.summary)
    (rows,) = re.findall(r"set per_device_eval_batch_size=(\d+)\.", first.finding.remedy)
    assert int(rows) < 32
    assert int(rows) * (int(num_parts) - 1) < 64 <= int(rows) * int(num_parts)
    assert not remarks(tmp_path, "allocator-retries")
    num = len(told)
    assert f"{num} batch{'es' * (num > 1)} ran out of memory and survived</h1>" in draw(tmp_path)
