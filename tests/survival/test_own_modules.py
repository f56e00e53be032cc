"""A loss of your own may have weights and counts of its own, beside the model."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Trainer

from tests.models import tiny_llama
from tests.survival.failing import off_by, padded, small_trainer, survive
from trainer_plugins import survive_oom


def without_labels(rows):
    return {**padded(rows), "labels": torch.zeros(len(rows))}


class Scores(nn.Module):
    """Scores tokens by weights of its own, and lets more and more of them through."""

    num_passes = 0

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weigh = nn.Linear(128, 4)

    def forward(self, logits):
        self.num_passes += 1
        return self.weigh(logits).square().mean((1, 2)) * min(1, self.num_passes / 10)


class ByScores(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Scores()

    def forward(self, outputs, labels, num_items_in_batch=None):
        return self.inner(outputs.logits).mean()


class Scored(Trainer):
    """Keeps the module of its loss, as trainers for metric learning do."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.criterion = Scores().to(self.args.device, self.model.dtype)

    def create_optimizer(self, *args):
        optimizer = super().create_optimizer(*args)
        optimizer.add_param_group({"params": [*self.criterion.parameters()]})
        return optimizer

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(inputs["input_ids"], inputs["attention_mask"])
        loss = self.criterion(outputs.logits).mean()
        return (loss, outputs) if return_outputs else loss


def kept_by_a_trainer(tmp_path):
    trainer = small_trainer(tmp_path, trainer_class=Scored, data_collator=without_labels)
    return trainer, trainer.criterion


def given_as_a_function(tmp_path):
    model, loss = tiny_llama().double(), ByScores().double()
    optimizer = torch.optim.AdamW([*model.parameters(), *loss.parameters()])
    options = {"compute_loss_func": loss, "optimizers": (optimizer, None)}
    return small_trainer(tmp_path, model, data_collator=without_labels, **options), loss.inner


@pytest.mark.parametrize("make", [kept_by_a_trainer, given_as_a_function])
def test_weights_and_counts_of_a_loss_are_those_of_the_whole(tmp_path, make) -> None:
    scores = []

    def made():
        trainer, module = make(tmp_path)
        scores.append(module)
        return trainer

    # Its own weights have their gradient by then, and most others have none.
    whole, survived = survive(made, {0: 0.65}, vouch_for_loss=True)
    theirs, ours = scores
    assert ours.num_passes == theirs.num_passes == 4
    assert off_by(survived.weights, whole.weights) <= 1e-12
    assert off_by([*ours.parameters()], [*theirs.parameters()]) <= 1e-12


def test_nor_do_they_get_a_gradient_from_the_longest_rows(tmp_path, simgpu) -> None:
    def weights(*, attached: bool):
        trainer = small_trainer(tmp_path, tiny_llama(), Scored, use_cpu=False)
        if attached:
            survive_oom(trainer, vouch_for_loss=True)
        trainer.train()
        return [one.detach().cpu() for one in trainer.criterion.parameters()]

    assert off_by(weights(attached=True), weights(attached=False)) == 0


class FollowedByATeacher(Trainer):
    """A mean teacher: each pass moves it a little towards the model."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.teacher = copy.deepcopy(self.model).requires_grad_(False)
        for parameter in self.teacher.parameters():
            parameter.mul_(1.1)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        with torch.no_grad():
            for mean, new in zip(self.teacher.parameters(), model.parameters(), strict=True):
                mean.lerp_(new, 0.1)
            aim = self.teacher(inputs["input_ids"]).logits
        return (model(inputs["input_ids"]).logits - aim).square().mean((1, 2)).mean()


def test_a_teacher_that_each_pass_moves_is_named(tmp_path) -> None:
    def make():
        return small_trainer(tmp_path, trainer_class=FollowedByATeacher)

    with pytest.raises(
        torch.OutOfMemoryError,
        match=r"`trainer.teacher.model.*`, a parameter of Embedding, changes in each",
    ):
        survive(make, {0: 0.4}, vouch_for_loss=True, ladder=())


class Momentum(nn.Module):
    """Adds what a slow copy of itself says, as BYOL's target does; the copy may be out of sight."""

    def __init__(self, norm: Any, *, is_registered: bool) -> None:
        super().__init__()
        self.norm = norm
        large = nn.Linear(32, 4096, bias=False).requires_grad_(False)
        self.kept = [large]
        if is_registered:
            self.large = large

    def forward(self, hidden):
        with torch.no_grad():
            self.kept[0].weight.lerp_(self.norm.weight.expand(4096, -1), 0.1)
        return self.norm(hidden) + self.kept[0](hidden).mean(-1, keepdim=True)


@pytest.mark.parametrize("is_registered", [True, False])
def test_so_is_a_copy_that_a_model_moves_along(tmp_path, is_registered: bool) -> None:
    model = tiny_llama()
    model.model.norm = Momentum(model.model.norm, is_registered=is_registered)
    trainer = small_trainer(tmp_path, model)
    survive_oom(trainer)
    with pytest.raises(ValueError, match="weight`, a parameter of Linear, changes in each forward"):
        trainer.train()
    assert trainer.state.global_step == 0
