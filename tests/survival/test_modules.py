"""What a forward pass moves is refused; what the longest sequence of a micro-batch decides is divided with care."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from transformers import DataCollatorWithFlattening

from tests.models import longrope_phi3, tiny_llama
from tests.survival.failing import (
    Run,
    gradients_off_by,
    off_by,
    ragged_rows,
    refuse,
    small_trainer,
    survive,
    with_norm,
)
from tests.survival.test_attach import remarks
from tests.survival.test_certificate import Noisy
from tests.written import read_findings
from trainer_plugins import survive_oom
from trainer_plugins.survival.exact.layouts import Rows
from trainer_plugins.survival.exact.shares import IndivisibleError


class Adapted(nn.Module):
    """Divides by a running mean of what it has met, as many norms of people's own do.

    Rows do not see each other.
    """

    size: torch.Tensor

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.register_buffer("size", torch.ones(()))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        out = self.norm(hidden) / self.size
        if self.training:
            self.size = 0.5 * self.size + 0.5 * hidden.detach().abs().mean()
        return out


def adapted(tmp_path):
    return small_trainer(tmp_path, with_norm(Adapted))


def test_a_buffer_that_each_pass_moves_is_refused_before_the_first_step(tmp_path) -> None:
    trainer = adapted(tmp_path)
    why = r"`model.norm.size`, a buffer of Adapted, changes in each forward pass"
    refuse(trainer, why, error=ValueError)
    assert trainer.state.global_step == 0


def test_a_run_with_such_a_buffer_goes_on_as_it_is_where_that_was_asked_for(tmp_path) -> None:
    plain = Run(adapted(tmp_path))
    trainer = adapted(tmp_path)
    survive_oom(trainer, on_refusal="warn")
    beside = Run(trainer)

    assert off_by(beside.weights, plain.weights) == 0
    assert torch.equal(trainer.model.model.norm.size, plain.trainer.model.model.norm.size)
    (finding,) = read_findings(tmp_path)
    assert "a buffer of Adapted" in finding.evidence

    why = r"^CUDA out of memory.* for number 100\.$"
    refuse(adapted(tmp_path), why, {1: [100]}, on_refusal="warn")


@pytest.mark.parametrize("on_refusal", ["error", "warn"])
def test_a_failure_in_the_very_first_pass_is_not_divided_either(tmp_path, on_refusal: str) -> None:
    why = r"`model.norm.size`, a buffer of Adapted, changes in each"
    refuse(adapted(tmp_path), why, {0: [100]}, ladder=(), on_refusal=on_refusal)


def packed_phi3(tmp_path, boundary: int):
    rows = [{"input_ids": row["input_ids"].tolist()} for row in ragged_rows()]
    model = longrope_phi3(boundary)
    return small_trainer(
        tmp_path, model, train_dataset=rows, data_collator=DataCollatorWithFlattening()
    )


class Nameless:
    """Draws by a class that names no module, as functions of older versions of Cython."""

    __module__ = property(lambda self: "one.of.instances")

    def __call__(self) -> float:
        return random.random()


@pytest.mark.parametrize(
    "draw", [random.random, np.random.random, Nameless()], ids=["Python", "numpy", "nameless"]
)
def test_a_layer_that_is_computed_again_draws_what_it_has_drawn(tmp_path, draw) -> None:
    """The only row did not fit: checkpointing is switched on, and torch keeps its own numbers alone."""

    def trainer():
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        model = tiny_llama()
        norm = model.model.layers[0].input_layernorm
        model.model.layers[0].input_layernorm = Noisy(norm, draw)
        return small_trainer(tmp_path, model.double(), per_device_train_batch_size=1)

    whole, run = survive(trainer, {1: 0.7})

    (told,) = remarks(tmp_path, "out-of-memory-survived")
    assert "with checkpointing switched on" in told.finding.summary
    assert gradients_off_by(run, whole) == 0


# Sequences have 6 to 16 tokens.
@pytest.mark.parametrize("boundary", [4, 16])
def test_longrope_is_divided_where_all_sequences_are_on_one_side(tmp_path, boundary: int) -> None:
    whole, survived = survive(lambda: packed_phi3(tmp_path, boundary), {0: 0.8, 3: 0.3})

    assert gradients_off_by(survived, whole) <= 1e-5, (
        "the softmax of its attention is taken in float32"
    )


def test_longrope_that_one_sequence_decides_for_all_is_refused(tmp_path) -> None:
    why = r"one of its sequences has 1\d tokens, and longrope switches the whole"
    refuse(packed_phi3(tmp_path, boundary=10), why, error=ValueError)


def test_longrope_and_rows_with_positions_of_their_own() -> None:
    positions = torch.tensor([[0, 1, 2, 3], [0, 1, 0, 1]])
    batch = {"input_ids": torch.ones(2, 4).long(), "position_ids": positions}

    assert (
        Rows(boundary=4).count(batch) == Rows(boundary=1).count(batch) == Rows().count(batch) == 2
    )
    with pytest.raises(IndivisibleError, match="has 4 tokens, and longrope"):
        Rows(boundary=3).count(batch)
