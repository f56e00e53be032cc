"""A user's own loss that compares rows: refused by name, and if it is vouched for, as soon as it is measured."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, normalize, softplus

from tests.survival.failing import ragged_rows, refuse, small_trainer
from tests.survival.test_sentences import Encoder, two_columns
from trainer_plugins import survive_oom


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder()
        self.scale = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
        waiting = torch.randn(16, 32, dtype=torch.float64, generator=torch.Generator())
        self.register_buffer("queue", normalize(waiting, dim=-1))

    def forward(self, kind, **columns):
        one, other = (self.embedded(columns, column) for column in ("one", "other"))
        return {"loss": LOSSES[kind](self, one, other, columns["one_input_ids"][:, 0] % 3)}

    def embedded(self, columns, column):
        kinds = ("input_ids", "attention_mask")
        outputs = self.encoder({kind: columns[f"{column}_{kind}"] for kind in kinds})
        return normalize(outputs["sentence_embedding"], dim=-1)


def temperature(model, one, other, labels):
    scores, there = model.scale.exp() * one @ other.T, torch.arange(len(one))
    return cross_entropy(scores, there) + cross_entropy(scores.T, there)


def queue(model, one, other, labels):
    scores = torch.cat([(one * other).sum(-1, keepdim=True), one @ model.queue.T], 1)
    if model.training:
        model.queue = torch.cat([other.detach(), model.queue])[:16]
    return cross_entropy(5 * scores, torch.zeros_like(labels))


def hard_negatives(model, one, other, labels):
    scores = 5 * one @ other.T
    others = scores.masked_fill(torch.eye(len(one), dtype=torch.bool), -1e9)
    return softplus(others.max(1).values - scores.diag()).mean()


def by_label(model, one, other, labels):
    rows, itself = torch.cat([one, other]), torch.eye(2 * len(one), dtype=torch.bool)
    same = (labels[:, None] == labels).repeat(2, 2) & ~itself
    logits = (5 * rows @ rows.T).masked_fill(itself, -1e9).log_softmax(1)
    return -((logits * same).sum(1) / same.sum(1)).mean()


def normalized(model, one, other, labels):
    one, other = ((side - side.mean(0)) / (side.std(0) + 0.01) for side in (one, other))
    return ((one - other) ** 2).mean()


def sorted_rows(model, one, other, labels):
    alike = (one * other).sum(-1).sort(descending=True).values
    return ((1 - alike) * torch.linspace(1, 0.1, len(alike), dtype=torch.float64)).mean()


LOSSES = {f.__name__: f for f in (temperature, queue, hard_negatives, by_label, normalized, sorted_rows)}  # fmt: skip


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.all(but=2)
def test_it_is_never_divided(tmp_path, kind: str) -> None:
    def trainer():
        return small_trainer(
            tmp_path,
            Towers(),
            per_device_train_batch_size=8,
            train_dataset=ragged_rows(),
            data_collator=lambda rows: {"kind": kind, **two_columns(rows)},
        )

    with pytest.raises(ValueError, match=r"Towers\.forward is not that of transformers"):
        survive_oom(trainer())
    why = (
        "`queue`, a buffer of Towers, changes in each forward pass"
        if kind == "queue"
        else "its gradient is not the sum over its parts"
    )
    errors = (torch.OutOfMemoryError, ValueError)
    refuse(trainer(), why, {0: [150]}, errors, vouch_for_loss=True, ladder=())
