"""A `compute_loss` that only calls `super()`, as those of LLaMA-Factory and axolotl do, is divided; any other is not."""

import copy
import math

import pytest
import torch
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer

from tests.survival.failing import (
    Allocations,
    Run,
    gradients_off_by,
    ragged_rows,
    refuse,
    small_trainer,
)
from tests.survival.test_attach import remarks
from trainer_plugins import protect, survive_oom


class LlamaFactorySFT(Seq2SeqTrainer):
    """`CustomSeq2SeqTrainer.compute_loss` of LLaMA-Factory in shape (65da72cdc): its other losses are off."""

    use_asft_loss = False

    def compute_loss(self, model, inputs, *args, **kwargs):
        if self.use_asft_loss:
            with torch.no_grad():
                reference = model(input_ids=inputs["input_ids"]).logits
            return (model(**inputs).logits - reference).square().mean() + 1
        return super().compute_loss(model, inputs, *args, **kwargs)


class Axolotl(Trainer):
    """`AxolotlTrainer.compute_loss` in shape (000724ed3): it counts tokens, and calls `super()` by keywords."""

    orpo_alpha = None

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if model.training:
            counted = (inputs["labels"] != -100).sum()
            if torch.distributed.is_initialized():
                torch.distributed.all_reduce(counted)
            self.num_trainable = getattr(self, "num_trainable", 0) + int(counted)
        if self.orpo_alpha:
            return self.orpo_compute_loss(model, inputs)
        return super().compute_loss(
            model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch
        )

    def training_step(self, *args, **kwargs):
        return super().training_step(*args, **kwargs)


CLIENTS = {
    "LLaMA-Factory": {
        "trainer_class": LlamaFactorySFT,
        "args_class": Seq2SeqTrainingArguments,
    },
    "axolotl": {"trainer_class": Axolotl},
}


@pytest.mark.parametrize("client", CLIENTS)
def test_a_client_divides_what_does_not_fit(tmp_path, client: str) -> None:
    method = Trainer.compute_loss
    whole = Run(small_trainer(tmp_path, **CLIENTS[client]))
    trainer = small_trainer(tmp_path, **CLIENTS[client], eval_dataset=ragged_rows(4))
    prepare = trainer._prepare_inputs
    protect(trainer, preset="survive")
    survived = Run(trainer, {0: [100], 3: [200]})

    assert survived.allocations.num_failed == 2
    assert gradients_off_by(survived, whole) <= 1e-12
    assert not remarks(tmp_path, "out-of-memory-refused")
    assert len(remarks(tmp_path, "out-of-memory-survived")) == 2

    trainer._prepare_inputs, alone = prepare, trainer.evaluate()["eval_loss"]
    with Allocations() as evaluation:
        evaluation.begin([60])
        assert trainer.evaluate()["eval_loss"] == pytest.approx(alone, rel=1e-9)
    assert evaluation.num_failed == 1
    assert Trainer.compute_loss is method


def filtered(inputs):
    return {name: value[:-1] for name, value in inputs.items()}


class Wrapper(Trainer):
    """Calls `super()` in a way of its own, from the micro-batch `since` on."""

    since = 0
    num_calls = 0

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        self.num_calls += model.training
        whole = lambda rows: super(Wrapper, self).compute_loss(  # noqa: E731
            model, rows, return_outputs, num_items_in_batch
        )
        if self.num_calls <= self.since or not model.training:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        return self.own(whole, model, inputs)


class Squares(Wrapper):
    def own(self, whole, model, inputs):
        return whole(inputs) ** 2


class ChangesInPlace(Wrapper):
    def own(self, whole, model, inputs):
        return whole(inputs).mul_(len(inputs["input_ids"]))


class AddsATerm(Wrapper):
    def own(self, whole, model, inputs):
        return whole(inputs) + 1e-3 * model(**inputs).logits.mean() ** 2


class AddsItInBackward(Wrapper):
    def own(self, whole, model, inputs):
        (1e-3 * model(**inputs).logits.mean() ** 2).backward()
        return whole(inputs)


class FiltersRows(Wrapper):
    def own(self, whole, model, inputs):
        return whole(filtered(inputs))


class MasksLabelsInPlace(Wrapper):
    def own(self, whole, model, inputs):
        inputs["labels"][0] = -100
        return whole(inputs)


class CallsTwice(Wrapper):
    def own(self, whole, model, inputs):
        whole(inputs)
        return whole(inputs)


class HooksTheLoss(Wrapper):
    def own(self, whole, model, inputs):
        loss = whole(inputs)
        loss.register_hook(lambda gradient: gradient * len(inputs["input_ids"]))
        return loss


class OtherModel(Wrapper):
    def own(self, whole, model, inputs):
        other = self.__dict__.setdefault("other", copy.deepcopy(model))
        return super(Wrapper, self).compute_loss(other, inputs)


OWN = {
    Squares: "returned another loss than {}",
    ChangesInPlace: "returned another loss than {}",
    AddsATerm: "returned another loss than {}",
    HooksTheLoss: "returned another loss than {}",
    AddsItInBackward: "changed rows or gradients besides calling {}",
    FiltersRows: "gave another model, rows or number of items to {}",
    MasksLabelsInPlace: "gave another model, rows or number of items to {}",
    OtherModel: "gave another model, rows or number of items to {}",
    CallsTwice: "called {} more than once in this step",
}


@pytest.mark.parametrize("kind", OWN)
def test_a_loss_of_its_own_is_refused_before_the_first_step(tmp_path, kind) -> None:
    trainer = small_trainer(tmp_path, trainer_class=kind)
    what = OWN[kind].format("Trainer.compute_loss")
    why = rf"{kind.__name__}.compute_loss is not known to be .*: it {what}"
    refuse(trainer, why, error=ValueError)
    assert trainer.state.global_step == 0

    warned = small_trainer(tmp_path, trainer_class=kind)
    refuse(warned, "", {1: [150]}, on_refusal="warn")  # as it is, and without a division
    (told,) = remarks(tmp_path, "out-of-memory-refused")
    assert "vouch_for_loss=True" in told.finding.evidence


@pytest.mark.parametrize("kind", [Squares, FiltersRows])
def test_one_that_delegates_for_some_time_is_divided_as_long(tmp_path, kind) -> None:
    class UntilTheLast(kind):
        """Delegates until its last micro-batch, which is larger than what fits, and is begun in parts."""

        num_steps = 0

        def training_step(self, *args, **kwargs):
            self.num_steps += 1
            self.since = 0 if self.num_steps == 8 else math.inf
            return super().training_step(*args, **kwargs)

    whole = Run(small_trainer(tmp_path, trainer_class=UntilTheLast, steps=4))
    trainer = small_trainer(tmp_path, trainer_class=UntilTheLast, steps=4)
    survive_oom(trainer, on_refusal="warn", plan_first=False)
    survived = Run(trainer, {2: [150]})

    assert survived.allocations.num_failed == 1
    assert gradients_off_by(survived, whole) <= 1e-12
    assert len(remarks(tmp_path, "out-of-memory-survived")) == 1
    assert len(remarks(tmp_path, "out-of-memory-refused")) == 1


def test_a_part_that_does_not_delegate_is_not_added(tmp_path) -> None:
    """It fails where all is computed in parts: the parts before are taken back, and the error stands."""

    class OnSmallOnes(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            loss = super().compute_loss(model, inputs, False, num_items_in_batch)
            return loss if len(inputs["input_ids"]) > 2 else loss * 2

    trainer = small_trainer(tmp_path, trainer_class=OnSmallOnes)
    options = {"on_refusal": "warn", "plan_first": False, "ladder": ()}
    refuse(trainer, "returned another loss than Trainer", {1: [150]}, **options)
    assert trainer.state.global_step == 0


def test_what_never_calls_another_is_refused_at_once(tmp_path) -> None:
    class Own(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return model(**inputs).loss

    with pytest.raises(ValueError, match=r"Own\.compute_loss is not known to be a sum"):
        survive_oom(small_trainer(tmp_path, trainer_class=Own))
    trainer = small_trainer(tmp_path)
    trainer.compute_loss = lambda *args, **kwargs: Trainer.compute_loss(trainer, *args, **kwargs)
    with pytest.raises(ValueError, match=r"something has replaced trainer\.compute_loss"):
        survive_oom(trainer)
