"""A module that mixes the rows of a micro-batch by chance, later or only some of them is found, whatever it draws by."""

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from tests.survival.failing import (
    Run,
    gradients_off_by,
    off_by,
    refuse,
    small_trainer,
    with_norm,
)
from tests.survival.test_attach import remarks
from trainer_plugins import survive_oom


def mixed(hidden, order=None):
    """Lets each row see the mean of another, as MixStyle does."""
    order = torch.randperm(len(hidden)) if order is None else order
    return hidden + 0.5 * (hidden.mean(1, keepdim=True)[order] - hidden.mean(1, keepdim=True))


class ByChance(nn.Module):
    """Mixes rows in training, where a number that it draws is below 0.05."""

    def __init__(self, norm: nn.Module, draw: Callable[[], Any], mix=mixed) -> None:
        super().__init__()
        self.norm, self.draw, self.mix = norm, draw, mix

    def forward(self, hidden):
        hidden = self.norm(hidden)
        return self.mix(hidden) if self.training and self.draw() < 0.05 else hidden


class Later(ByChance):
    """Mixes rows from its sixth pass on, which a dictionary in a data class counts."""

    @dataclasses.dataclass
    class Passes:
        num: dict[str, int]

    def __init__(self, norm: nn.Module) -> None:
        super().__init__(norm, self.count)
        self.passes = self.Passes({"num": 0})

    def count(self) -> float:
        self.passes.num["num"] += self.training
        return float(self.passes.num["num"] < 6)


class Dear(ByChance):
    """Mixes a row with the next if it is one of those that begin with a small number."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__(norm, lambda: 0, self.where)

    def where(self, hidden):
        order = torch.arange(len(hidden))
        marked = hidden[:, 0, 0] <= hidden[:, 0, 0].median()
        order[marked] = order[marked].roll(1)
        return mixed(hidden, order)


class Remembered(nn.Module):
    """A weight that follows the rows of this pass: the parametrization reads what a hook has noted."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = torch.ones((), dtype=torch.float64)

    def forward(self, weight):
        return weight * self.seen if self.training and random.random() < 0.05 else weight


def parametrized(norm):
    scaled = Remembered()
    parametrize.register_parametrization(norm, "weight", scaled)
    norm.register_forward_pre_hook(
        lambda _, args: setattr(scaled, "seen", 1 + args[0].detach().mean((1, 2)).std())
    )
    return norm


def hooked(norm):
    norm.register_forward_hook(
        lambda module, _, out: mixed(out) if module.training and random.random() < 0.05 else out
    )
    return norm


def replaced(norm):
    forward = norm.forward
    norm.forward = lambda hidden: (
        mixed(forward(hidden)) if np.random.rand() < 0.05 else forward(hidden)
    )
    return norm


OWN = np.random.default_rng(0)
MIXERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "python": lambda norm: ByChance(norm, random.random),
    "numpy": lambda norm: ByChance(norm, np.random.rand),
    "torch": lambda norm: ByChance(norm, lambda: torch.rand(1)),
    "torch, from above": lambda norm: ByChance(norm, lambda: 1 - torch.rand(())),
    "normal": lambda norm: ByChance(norm, lambda: 1.5 - torch.randn(1)),
    "by shuffling": lambda norm: ByChance(
        norm, random.random, lambda x: mixed(x, random.sample(range(len(x)), len(x)))
    ),
    "batch mean": lambda norm: ByChance(norm, random.random, lambda x: x - x.mean(0)),
    "two draws": lambda norm: ByChance(
        norm, lambda: max(random.random(), float(torch.rand(1)) - 0.3)
    ),
    "own generator": lambda norm: ByChance(norm, lambda: OWN.random() - 0.3),
    "a row at a time": lambda norm: ByChance(
        norm, lambda: 0, lambda x: torch.stack([x[(i + (random.random() < 0.3)) % len(x)] for i in range(len(x))])
    ),
    "some rows": Dear,
    "a hook": hooked,
    "a forward": replaced,
    "a parametrization": parametrized,
}  # fmt: skip


def mixing(tmp_path, make, dtype=torch.float64, dropout=0.1, **kwargs):
    model = with_norm(make, attention_dropout=dropout)
    return small_trainer(tmp_path, model.to(dtype), **kwargs)


@pytest.mark.parametrize("name", MIXERS)
@pytest.mark.all(but=4)
def test_rows_that_are_mixed_by_chance_are_not_divided(tmp_path, name: str) -> None:
    dtype = torch.bfloat16 if name in ("python", "a hook") else torch.float64
    trainer = mixing(tmp_path, MIXERS[name], dtype)
    why = r"`model.norm` \(.* mixes the rows|is not the sum over|each pass changes"
    refuse(trainer, why, {0: [100]}, ladder=())
    assert not remarks(tmp_path, "out-of-memory-survived")


def test_rows_that_are_mixed_later_are_found_before_they_are_divided(tmp_path) -> None:
    """Passes that count are compared again before each micro-batch that is divided."""
    whole = Run(mixing(tmp_path, Later, dropout=0.0, steps=4))
    trainer = mixing(tmp_path, Later, dropout=0.0, steps=4)
    survive_oom(trainer, ladder=(), on_refusal="warn")
    divided = Run(trainer, {0: [100]})
    (told,) = remarks(tmp_path, "gradients-in-doubt")
    assert told.step == 3
    assert "`model.norm` (Later) mixes the rows" in told.finding.evidence
    assert off_by(divided.weights, whole.weights) <= 1e-6
    assert gradients_off_by(divided, whole) <= 1e-6


@pytest.mark.parametrize("draw", [random.random, np.random.rand, lambda: float(OWN.random())])
def test_a_layer_that_is_left_out_by_chance_mixes_nothing(tmp_path, draw) -> None:
    """Rows are divided: each pass draws by itself, as with a smaller micro-batch."""
    trainer = mixing(
        tmp_path, lambda norm: ByChance(norm, draw, lambda x: x * (1 + draw()) + torch.rand_like(x))
    )
    survive_oom(trainer, ladder=())
    Run(trainer, {0: [100]})
    assert len(remarks(tmp_path, "out-of-memory-survived")) == 1
