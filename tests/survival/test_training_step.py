"""What a `training_step` of the user's own makes of the loss: followed exactly, or refused before a step is taken."""

import pytest
import torch
from transformers import Trainer

from tests.models import tiny_llama
from tests.survival.failing import Run, gradients_off_by, refuse, small_trainer, survive
from trainer_plugins import survive_oom


class Makes(Trainer):
    """Makes another loss of it, from micro-batch `first` on."""

    make = staticmethod(lambda loss: loss)
    first = num = 0

    def training_step(self, model, inputs, num_items_in_batch=None):
        model.train()
        loss = self.compute_loss(
            model, self._prepare_inputs(inputs), num_items_in_batch=num_items_in_batch
        )
        if self.num >= self.first:
            loss = self.make(loss)
        self.num += 1
        self.accelerator.backward(loss)
        return loss.detach()


# Each has the value of the loss, or nearly, and another gradient.
NEARLY = {
    "flooding, of the wrong sign": lambda loss: (
        (loss - 1.002 * loss.detach()).abs() + 1.002 * loss.detach()
    ),
    "squared, twice": lambda loss: loss**2 / loss.detach(),
    "logarithm, a fifth": lambda loss: loss.log() * (loss / loss.log()).detach(),
    "half a percent": lambda loss: loss * 0.995,
}


def trainer_that(tmp_path, make, first=0, **kwargs):
    trainer = small_trainer(tmp_path, trainer_class=Makes, **kwargs)
    trainer.make, trainer.first = make, first
    return trainer


@pytest.mark.parametrize("how", NEARLY)
def test_another_loss_is_refused_before_the_first_step(tmp_path, how: str) -> None:
    trainer = trainer_that(tmp_path, NEARLY[how])
    refuse(trainer, "training_step changes the loss that", error=ValueError)
    assert trainer.state.global_step == 0

    warned = trainer_that(tmp_path, NEARLY[how])
    survive_oom(warned, on_refusal="warn")
    assert gradients_off_by(Run(warned), Run(trainer_that(tmp_path, NEARLY[how]))) == 0


@pytest.mark.parametrize("at", [0.3, 0.85], ids=["forward", "backward"])
@pytest.mark.parametrize("how", NEARLY)
def test_one_that_becomes_another_later_is_stopped_where_it_is_divided(
    tmp_path, how: str, at: float
) -> None:
    """The first micro-batches are as the Trainer's own: only the division of the fourth shows it."""
    num = Run(trainer_that(tmp_path, NEARLY[how], first=3)).num_allocations[3]
    trainer = trainer_that(tmp_path, NEARLY[how], first=3)
    why = "training_step changes the loss that compute_loss returned"
    refuse(trainer, why, {3: [int(at * num)]}, RuntimeError)
    assert trainer.state.global_step == 1


@pytest.mark.parametrize("at", [0.3, 0.8], ids=["forward", "backward"])
def test_a_loss_that_is_scaled_otherwise_is_not_taken_for_right(tmp_path, at: float) -> None:
    num = Run(trainer_that(tmp_path, lambda loss: loss * 2)).num_allocations[0]
    trainer = trainer_that(tmp_path, lambda loss: loss * 2)
    why = "it scales the gradient by 2, where the Trainer's own scales it by 1"
    refuse(trainer, why, {0: [int(at * num)]}, (RuntimeError, ValueError))
    assert trainer.state.global_step == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_accumulated", [3, 7])
@pytest.mark.parametrize("at", [0.3, 0.8], ids=["forward", "backward"])
@pytest.mark.all(but=3)
def test_a_factor_that_is_rounded_is_the_trainers(
    tmp_path, dtype, num_accumulated: int, at: float
) -> None:
    class Divides(Trainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            model.train()
            loss = self.compute_loss(model, self._prepare_inputs(inputs))
            loss = loss.to(dtype) / self.current_gradient_accumulation_steps
            self.accelerator.backward(loss)
            return loss.detach()

    def make():
        how = {"trainer_class": Divides, "gradient_accumulation_steps": num_accumulated, "steps": 1}
        return small_trainer(tmp_path, tiny_llama().to(dtype), **how)

    whole, survived = survive(make, {1: at})
    assert gradients_off_by(survived, whole) <= {torch.float64: 1e-6, torch.float32: 1e-5}.get(
        dtype, 3e-2
    )
