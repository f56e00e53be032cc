"""`vouch_for_loss`: a loss of one's own is divided where it is measured to be additive, and refused where not."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from transformers import HfArgumentParser, Trainer
from transformers.loss.loss_utils import LOSS_MAPPING

from tests.models import tiny_llama
from tests.survival.failing import (
    Run,
    gradients_by_rounding,
    gradients_off_by,
    packed,
    padded,
    refuse,
    small_trainer,
    survive,
)
from tests.survival.test_attach import remarks
from trainer_plugins import MemoryArguments, callbacks_from_args, protect, survive_oom


class Ascends(Trainer):
    """As unlearning by gradient ascent does: away from what the model has learned, a mean over tokens."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        return (-outputs.loss, outputs) if return_outputs else -outputs.loss


class Squares(Trainer):
    """The square of a mean: no sum over examples."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return super().compute_loss(model, inputs, num_items_in_batch=num_items_in_batch) ** 2


def by_rows(outputs, labels, num_items_in_batch=None):
    """A mean over rows, however long each is, that the Trainer does not divide by the accumulation steps."""
    losses = nn.functional.cross_entropy(
        outputs.logits[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none"
    )
    return (losses.sum(1) / (labels[:, 1:] != -100).sum(1)).mean()


def weighted(model):
    model.register_forward_hook(lambda module, args, outputs: {**outputs, "loss": outputs.loss * 3})


LOSSES: dict[str, tuple] = {
    "compute_loss": ({"trainer_class": Ascends}, "a mean over next tokens"),
    "compute_loss_func": ({"compute_loss_func": by_rows}, "a mean over"),
    "hook": ({"hook": weighted}, "a sum over the window"),
}


def make(tmp_path, hook=None, **kwargs):
    model = tiny_llama().double()
    if hook:
        hook(model)
    return small_trainer(tmp_path, model, **kwargs)


@pytest.mark.all
@pytest.mark.parametrize("case", LOSSES)
def test_a_loss_of_ones_own_is_divided_as_it_is_measured(tmp_path, case: str) -> None:
    kwargs, measured = LOSSES[case]
    with pytest.raises(ValueError, match="if it is a sum or a mean over examples"):
        survive_oom(make(tmp_path, **kwargs))

    whole, survived = survive(
        lambda: make(tmp_path, **kwargs), {0: 0.4, 3: 0.8}, vouch_for_loss=True
    )
    assert gradients_off_by(survived, whole) <= 1e-6
    told = remarks(tmp_path, "out-of-memory-survived")[0].finding.evidence
    assert f"; you vouched for the loss: it was measured as {measured}" in told


def test_tokens_of_short_answers_are_not_measured_one_by_one_in_each_micro_batch(
    tmp_path, caplog
) -> None:
    """Few tokens of one micro-batch have labels, as if these were classes, and the next has others."""
    caplog.set_level("INFO", "trainer_plugins")
    answers = [{"input_ids": torch.arange(1, 19) + 17 * row} for row in range(6)]

    def answering() -> Trainer:
        sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 1}
        options = {"train_dataset": answers, "steps": 3, "compute_loss_func": by_rows}
        model = tiny_llama(num_hidden_layers=1).double()
        return small_trainer(tmp_path, model, **options, **sizes)

    whole, survived = survive(answering, {0: 0.4, 1: 0.4, 2: 0.4}, vouch_for_loss=True)
    assert gradients_off_by(survived, whole) <= 1e-6
    measured = [line for line in caplog.messages if line.startswith("pieces add up, measured on")]
    assert len(measured) == 1
    assert " and one without (1 + 1) and for " in measured[0]


class WarmsUp(Trainer):
    """Counts its calls, and lets more and more of the loss through."""

    num_calls = num_rows = 0

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        self.num_calls += 1
        self.num_rows += len(inputs["labels"])
        return model(**inputs).loss * min(1, self.num_calls / 10)


def test_a_count_that_a_loss_depends_on_is_of_micro_batches(tmp_path) -> None:
    def collate(rows):
        batch = padded(rows)
        return {**batch, "labels": batch["labels"].where(batch["labels"] < 0, 3)}

    whole, survived = survive(
        lambda: make(tmp_path, trainer_class=WarmsUp, data_collator=collate),
        {0: 0.8},
        vouch_for_loss=True,
    )
    assert gradients_by_rounding(survived.gradients, whole.gradients) <= 1
    assert remarks(tmp_path, "out-of-memory-survived")
    assert survived.trainer.num_calls == whole.trainer.num_calls == 4
    assert survived.trainer.num_rows == whole.trainer.num_rows == 16


@pytest.mark.all
def test_one_that_is_measured_not_to_be_is_not_divided(tmp_path) -> None:
    trainer = make(tmp_path, trainer_class=Squares)
    why = "its gradient is not the sum over its parts"
    refuse(trainer, why, {0: [100]}, vouch_for_loss=True, ladder=())


ORDERS: dict[str, Callable[[int], torch.Tensor]] = {
    "randperm": torch.randperm,
    "sorted": lambda num: torch.rand(num).argsort(),
}


class Mixed(Trainer):
    """mixup: each row with one that is drawn from the same micro-batch."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        order = ORDERS[self.args.run_name](len(inputs["labels"]))
        embedded = model.get_input_embeddings()(inputs["input_ids"])
        mixed = 0.7 * embedded + 0.3 * embedded[order]
        outputs = model(inputs_embeds=mixed, labels=inputs["labels"])
        other = model(inputs_embeds=mixed, labels=inputs["labels"][order])
        return 0.7 * outputs.loss + 0.3 * other.loss


@pytest.mark.parametrize("order", ORDERS)
def test_rows_that_are_mixed_with_others_are_not_divided(tmp_path, order: str) -> None:
    dice = torch.Generator().manual_seed(0)
    rows = [{"input_ids": torch.randint(1, 127, (48,), generator=dice)} for _ in range(8)]
    trainer = make(tmp_path, trainer_class=Mixed, run_name=order, train_dataset=rows)
    why = "its gradient is not the sum over its parts"
    refuse(trainer, why, {0: [100]}, vouch_for_loss=True, ladder=())


def by_preset(trainer):
    protect(trainer, preset="survive", vouch_for_loss=True)


def by_arguments(trainer):
    (args,) = HfArgumentParser(MemoryArguments).parse_args_into_dataclasses(
        ["--memory_preset", "survive", "--memory_vouch_for_loss", "True"]
    )
    for callback in callbacks_from_args(args):
        trainer.add_callback(callback)


@pytest.mark.all
@pytest.mark.parametrize("attach", [by_preset, by_arguments])
def test_by_every_door(tmp_path, attach) -> None:
    whole = Run(make(tmp_path, trainer_class=Ascends))
    trainer = make(tmp_path, trainer_class=Ascends)
    attach(trainer)
    survived = Run(trainer, {1: [100]})
    assert survived.allocations.num_failed == 1
    assert gradients_off_by(survived, whole) <= 1e-6


def test_an_entry_put_into_the_losses_of_transformers_is_named(tmp_path, monkeypatch) -> None:
    def mine(logits, labels, vocab_size, **kwargs):
        return logits.mean()

    monkeypatch.setitem(LOSS_MAPPING, "ForCausalLM", mine)
    with pytest.raises(
        ValueError, match=r"entry 'ForCausalLM' of transformers' LOSS_MAPPING is tests.*mine"
    ):
        survive_oom(make(tmp_path))


def test_a_forward_that_a_user_patches_into_the_class_is_named(tmp_path, monkeypatch) -> None:
    model = tiny_llama()
    forward = type(model).forward
    monkeypatch.setattr(
        type(model), "forward", lambda self, *args, **kwargs: forward(self, *args, **kwargs)
    )
    with pytest.raises(ValueError, match=r"LlamaForCausalLM\.forward was replaced by tests"):
        survive_oom(small_trainer(tmp_path, model))


def with_mixed_precision(tmp_path):
    return small_trainer(tmp_path, tiny_llama(), bf16=True)


def with_adapters(tmp_path):
    peft = pytest.importorskip("peft")
    return small_trainer(
        tmp_path, peft.get_peft_model(tiny_llama(), peft.LoraConfig(task_type="CAUSAL_LM"))
    )


def with_hooks_of_accelerate(tmp_path):
    from accelerate.hooks import ModelHook, add_hook_to_module

    return small_trainer(tmp_path, add_hook_to_module(tiny_llama(), ModelHook()))


def with_every_guard(tmp_path):
    trainer = small_trainer(tmp_path, tiny_llama())
    protect(trainer, preset="memory_safe")
    return trainer


@pytest.mark.parametrize(
    "make", [with_mixed_precision, with_adapters, with_hooks_of_accelerate, with_every_guard]
)
def test_what_libraries_put_around_a_forward_passes(tmp_path, make) -> None:
    trainer = make(tmp_path)
    survive_oom(trainer)
    trainer.train()
    again = Run(trainer, {1: [100]})  # accelerate has wrapped the model by then
    assert again.allocations.num_failed == 1
    assert trainer.state.global_step == 2


class Spread(Trainer):
    """Adds the deviation between the rows of a micro-batch: of one row it is not a number."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        logits = model(**{name: inputs[name] for name in ("input_ids", "attention_mask")}).logits
        of_rows = logits.square().mean((1, 2))
        return of_rows.mean() + of_rows.std()


@pytest.mark.all
def test_a_part_that_is_not_a_number_is_called_so(tmp_path) -> None:
    trainer = small_trainer(tmp_path, trainer_class=Spread)
    why = "the gradient of a part is not a number: measured on 2 of its rows"
    refuse(trainer, why, {0: [100]}, vouch_for_loss=True, ladder=())


def test_packed_rows_with_noise_that_depends_on_their_length_are_refused(tmp_path) -> None:
    def make(collate):
        model = tiny_llama(use_cache=False).double()
        return small_trainer(tmp_path, model, neftune_noise_alpha=5.0, data_collator=collate)

    why = "neftune_noise_alpha scales its noise down with the length of a packed row"
    refuse(make(packed), why, error=ValueError)
    trainer = make(padded)  # padded rows keep their length
    survive_oom(trainer)
    assert Run(trainer, {0: [100]}).allocations.num_failed == 1
