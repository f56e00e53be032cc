"""Whether pieces add up is measured on rows of the run, in training mode, at the size of pieces, and again later."""

import random
import re
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    Wav2Vec2Config,
    Wav2Vec2ForSequenceClassification,
    default_data_collator,
)

from tests.models import checkpointing, tiny_llama
from tests.survival.failing import (
    Recentred,
    Run,
    gradients_by_rounding,
    gradients_off_by,
    numpy_draws_by,
    refuse,
    small_trainer,
    survive,
    with_norm,
)
from tests.survival.test_attach import remarks
from tests.survival.test_families import images
from trainer_plugins import survive_oom
from trainer_plugins.survival.memo import memo_of

MODES = {"no checkpointing": {}, "reentrant": checkpointing(reentrant=True)}


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.all(but=2)
def test_a_batch_norm_of_ones_own_is_found_beside_dropout(
    tmp_path, mode: str, dropout: float
) -> None:
    model = with_norm(lambda norm: nn.Sequential(norm, Recentred(32)), attention_dropout=dropout)
    why = r"its gradient is not the sum over its parts: measured on 2 of its rows \(1 \+ 1\), in training mode, it is"
    refuse(small_trainer(tmp_path, model, **MODES[mode]), why, {0: [100]}, ladder=())


def test_dropout_alone_is_no_reason(tmp_path) -> None:
    def make():
        return small_trainer(tmp_path, GPT2LMHeadModel(GPT2Config(
            vocab_size=128, n_positions=32, n_embd=32, n_layer=2, n_head=4)).double())  # fmt: skip

    _, survived = survive(make, {0: 0.4, 1: 0.8})
    assert survived.allocations.num_failed == 2


class Powered(nn.Module):
    """A weight whose direction a forward pass moves on, as spectral_norm's power iteration does."""

    scale: torch.Tensor

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner
        self.register_buffer("scale", torch.ones((), dtype=torch.float64))

    def forward(self, hidden):
        if self.training:
            self.scale.mul_(1.1)
        return self.inner(hidden) / self.scale


def test_a_buffer_that_a_forward_pass_moves_is_found(tmp_path) -> None:
    model = tiny_llama().double()
    model.lm_head = Powered(model.lm_head)
    why = r"`lm_head.scale`, a buffer of Powered, changes in each forward"
    refuse(small_trainer(tmp_path, model), why, {0: [100]}, ladder=())
    assert float(model.lm_head.scale) == 1.0, (
        "the attempt failed before it, and what was measured is put back"
    )


class FirstCome(nn.Module):
    """Doubles the first 70 tokens of a micro-batch, as experts of a capacity serve them.

    Short samples have 64.
    """

    def forward(self, hidden):
        tokens = hidden.flatten(0, 1)
        return torch.cat([2 * tokens[:70], tokens[70:]]).view_as(hidden)


def test_a_coupling_that_only_long_rows_reach(tmp_path) -> None:
    dice = torch.Generator().manual_seed(1)
    rows = [{"input_ids": torch.randint(3, 127, (48,), generator=dice)} for _ in range(64)]
    model = with_norm(lambda norm: nn.Sequential(norm, FirstCome()))
    trainer = small_trainer(tmp_path, model, train_dataset=rows, per_device_train_batch_size=8)
    why = r"measured on 4 of its rows \(2 \+ 2\), in training mode"
    refuse(trainer, why, {0: [100]}, ladder=())


class InOrder(Trainer):
    def _get_train_sampler(self, *args):
        return torch.utils.data.SequentialSampler(self.train_dataset)


class Weighted(nn.Module):
    """A classifier whose loss counts some classes more, and is divided by all that was counted."""

    weights = torch.tensor([1.0, 5.0, 9.0])

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(128, 8), nn.Linear(8, 3)

    def forward(self, input_ids, labels=None, attention_mask=None):
        logits = self.head(self.embed(input_ids).mean(1))
        return {"loss": self.loss(logits, labels)}

    def loss(self, logits, labels):
        return nn.functional.cross_entropy(logits, labels, self.weights)


class WeightedByHand(Weighted):
    def loss(self, logits, labels):
        weights = self.weights[labels]
        losses = nn.functional.cross_entropy(logits, labels, reduction="none")
        return (losses * weights).sum() / weights.sum()


def imbalanced(tmp_path, model, num_alike: int, steps: int, of_tokens: bool = False):
    """The first rows are of one class, the others of three."""
    rows = [
        {"input_ids": torch.arange(1, 7) + n % 100, "labels": 0 if n < num_alike else n * n % 3}
        for n in range(3200)
    ]

    def collate(rows):
        labels = torch.tensor([row["labels"] for row in rows])
        ids = torch.stack([row["input_ids"] for row in rows])
        if of_tokens:
            labels = (labels[:, None] * ids % 3).masked_fill(ids % 5 == 0, -100)
        return {"input_ids": ids, "labels": labels}

    return small_trainer(
        tmp_path, model, InOrder, train_dataset=rows, data_collator=collate, steps=steps
    )


class TaggedTokens(Weighted):
    def forward(self, input_ids, labels=None, attention_mask=None):
        logits = self.head(self.embed(input_ids)).transpose(1, 2)
        return {"loss": self.loss(logits, labels)}


@pytest.mark.parametrize(("model", "where"), [(Weighted, 0.3), (TaggedTokens, 0.15)])
def test_class_weights_of_cross_entropy_are_those_of_pieces(tmp_path, model, where: float) -> None:
    def make():
        return imbalanced(tmp_path, model().double(), 40, 12, of_tokens=model is TaggedTokens)

    model.weights = Weighted.weights.double()
    whole, survived = survive(make, {0: where}, ladder=(), vouch_for_loss=True)
    assert gradients_off_by(survived, whole) <= 1e-12
    (told,) = remarks(tmp_path, "out-of-memory-survived")
    assert "it was measured as a mean that is weighted by class" in told.finding.evidence


class Penalized(Weighted):
    """Keeps the gradient of what each row is worth near 1, by a second backward pass."""

    def forward(self, input_ids, labels=None, attention_mask=None):
        hidden = self.embed(input_ids).mean(1)
        worth = self.head(hidden.tanh()).pow(2).sum(1)
        (slope,) = torch.autograd.grad(worth.sum(), hidden, create_graph=True)
        return {"loss": worth.mean() + (slope.norm(dim=1) - 1).pow(2).mean()}


def test_a_gradient_penalty_is_divided(tmp_path) -> None:
    def make():
        return imbalanced(tmp_path, Penalized().double(), 40, 2)

    whole, survived = survive(make, {0: 0.3, 2: 0.8}, ladder=(), vouch_for_loss=True)
    assert gradients_off_by(survived, whole) <= 1e-12


@pytest.mark.parametrize("num_alike", [4, 80])
def test_a_weighted_mean_by_hand_is_refused_before_its_classes_meet(tmp_path, num_alike) -> None:
    """Micro-batches of one class are divided, rightly; the first with two is not."""
    trainer = imbalanced(tmp_path, WeightedByHand(), num_alike, steps=20)
    why = r"its gradient is not the sum over its parts: measured on .* it is off by"
    if num_alike < 8:
        refuse(trainer, why, {1: [8]}, ladder=(), vouch_for_loss=True)
        return
    survive_oom(trainer, ladder=(), vouch_for_loss=True)
    Run(trainer, {0: [8]})
    (told,) = remarks(tmp_path, "gradients-in-doubt")
    assert re.search(why, told.finding.evidence)
    assert "those split in steps 1 to 10 may be wrong" in told.finding.summary


class Linear(nn.Module):
    """A mean over labelled tokens of what they are worth."""

    def __init__(self) -> None:
        super().__init__()
        self.worth = nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, input_ids, labels=None, attention_mask=None):
        worth = (input_ids.double() - 3) * self.worth
        return {"loss": worth[labels != -100].mean()}


def test_two_rows_whose_mean_is_their_sum_by_chance(tmp_path) -> None:
    """They are worth -1, and 2 and 2: their mean over tokens, 1, is the sum of -1 and 2."""
    rows = [
        {"input_ids": torch.tensor([2, 3, 3]), "labels": torch.tensor([1, -100, -100])},
        {"input_ids": torch.tensor([5, 5, 3]), "labels": torch.tensor([1, 1, -100])},
    ]
    data = {"train_dataset": rows * 16, "per_device_train_batch_size": 2}

    def make():
        return small_trainer(
            tmp_path, Linear(), InOrder, data_collator=default_data_collator, **data
        )

    whole, survived = survive(make, {0: 0.3}, ladder=(), vouch_for_loss=True)
    assert gradients_off_by(survived, whole) <= 1e-12
    (told,) = remarks(tmp_path, "out-of-memory-survived")
    assert "it was measured as a mean over tokens" in told.finding.evidence


class Injects(torch.autograd.Function):
    """Adds a gradient of its own, as the auxiliary losses of DeepSeek's experts do."""

    @staticmethod
    def forward(ctx, hidden, scores):
        ctx.save_for_backward(scores)
        return hidden.clone()

    @staticmethod
    def backward(ctx, gradient):
        (scores,) = ctx.saved_tensors
        return gradient, 0.1 * scores / scores.size(0)


class WithAuxiliary(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.router = norm, nn.Linear(32, 4)

    def forward(self, hidden):
        return Injects.apply(self.norm(hidden), self.router(hidden))


def test_a_loss_that_is_injected_in_the_backward_pass_is_found(tmp_path) -> None:
    """That of a part is as large as that of the whole, whatever training multiplies its loss by."""
    pytest.importorskip("trl")
    from tests.survival.test_trl import reward

    trainer = reward(tmp_path)
    trainer.model.model.norm = WithAuxiliary(trainer.model.model.norm).double()
    refuse(trainer, "its gradient is not the sum over its parts", {0: [100]}, ladder=())


class CentredFrom(nn.Module):
    """Subtracts the mean of the micro-batch if it has so many rows."""

    def __init__(self, num: int) -> None:
        super().__init__()
        self.num = num

    def forward(self, hidden):
        return hidden - hidden.mean(0) if len(hidden) >= self.num else hidden


def test_batch_statistics_that_begin_at_eight_rows(tmp_path) -> None:
    model = with_norm(lambda norm: nn.Sequential(norm, CentredFrom(8)))
    trainer = small_trainer(tmp_path, model, per_device_train_batch_size=8)
    why = r"measured on all 8 of its rows, cut short \(4 \+ 4\), in training"
    refuse(trainer, why, {0: [100]}, ladder=())


def test_batch_statistics_of_eight_images_that_cannot_be_cut_short(tmp_path) -> None:
    trainer = images(tmp_path, per_device_train_batch_size=8)
    vit = trainer.model.vit
    vit.layernorm = nn.Sequential(vit.layernorm, CentredFrom(8))
    why = r"its loss is not the sum over its parts.*all 8 of its rows.*by the loss alone"
    refuse(trainer, why, {0: [100]}, ladder=())


class NotANumber(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor, self.head = factor, nn.Linear(6, 3)

    def forward(self, input_ids, labels=None, attention_mask=None):
        hidden = self.head(input_ids[:, :6].float()).relu()
        return {"loss": nn.functional.cross_entropy(hidden, labels[:, 0] % 3) * self.factor}


class MixedWhereAsked(nn.Module):
    """Lets rows see each other, but only in batches that say so."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.is_mixed = inner, False

    def forward(self, hidden):
        hidden = self.inner(hidden)
        return hidden - hidden.mean(0) if self.is_mixed else hidden

    def ask(self, module, args, kwargs):
        self.is_mixed = kwargs.pop("contrast", None) is not None
        return args, kwargs


def test_another_kind_of_batch_is_measured_for_itself(tmp_path) -> None:
    """The first batches add up; those after them bring a tensor more, and do not."""
    model = with_norm(MixedWhereAsked)
    model.register_forward_pre_hook(model.model.norm.ask, with_kwargs=True)

    def collate(rows):
        tokens = torch.stack([row["input_ids"] for row in rows])
        batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}
        return {**batch, "contrast": torch.ones(len(rows))} if "contrast" in rows[0] else batch

    dice = torch.Generator().manual_seed(1)
    rows = [
        {
            "input_ids": torch.randint(3, 127, (16,), generator=dice),
            **({"contrast": 1} if n >= 8 else {}),
        }
        for n in range(12)
    ]
    data = {"train_dataset": rows, "data_collator": collate, "remove_unused_columns": False}
    trainer = small_trainer(tmp_path, model, InOrder, **data, steps=3)
    survive_oom(trainer, ladder=())
    Run(trainer, {0: [100], 1: [100]})
    assert len(remarks(tmp_path, "out-of-memory-survived")) == 2
    (told,) = remarks(tmp_path, "gradients-in-doubt")
    assert told.step == 2, "the third micro-batch, before it is divided"
    assert "its gradient is not the sum over its parts" in told.finding.evidence


@pytest.mark.parametrize("factor", [float("nan"), 0.0])
def test_a_gradient_that_tells_nothing_keeps_the_words_of_the_error(
    tmp_path, factor: float
) -> None:
    trainer = small_trainer(tmp_path, NotANumber(factor), data_collator=lambda rows: {
        name: torch.stack([row["input_ids"][:6] for row in rows]) for name in ("input_ids", "labels")})  # fmt: skip
    why = r"(?s)^CUDA out of memory.*its gradient is 0, or not a number, on 2 examples"
    refuse(trainer, why, {0: [6]}, ladder=(), vouch_for_loss=True)


def test_memory_that_ends_between_the_passes_of_a_measurement(tmp_path) -> None:
    """Nothing was measured then, so checkpointing is switched on, as where a measured pass fails."""
    whole = Run(small_trainer(tmp_path, steps=1))
    first = whole.num_allocations[1] // 2

    def survived(*then: int) -> Run:
        trainer = small_trainer(tmp_path, steps=1)
        survive_oom(trainer)
        return Run(trainer, {1: [first, *then]})

    num = survived().num_allocations[1]
    second = [first + part * (num - first) // 100 for part in (32, 38)]
    rungs = []
    for then in second:
        run = survived(then)
        assert run.allocations.num_failed == 2
        assert gradients_by_rounding(run.gradients, whole.gradients, dtype=torch.float64) <= 1
        rungs += memo_of(run.trainer).rungs
    assert "checkpointing" in rungs


def takes_three(module, args) -> None:
    """Of images, which nothing is cut off: a card that takes three of them at once, and not four."""
    if len(args[0]) > 3:
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.00 MiB for four images."
        )


def test_images_of_which_a_card_takes_three_and_not_four(tmp_path) -> None:
    trainer = images(tmp_path, per_device_train_batch_size=8)
    trainer.model.vit.embeddings.patch_embeddings.projection.register_forward_pre_hook(takes_three)
    survive_oom(trainer)
    run = Run(trainer)
    assert not trainer.model.is_gradient_checkpointing, "nothing had to be switched on"
    first, *_ = remarks(tmp_path, "out-of-memory-survived")
    assert (
        "measured on 2 of its rows (1 + 1) and 3 of its rows, cut short (1 + 2), in training mode"
        in first.finding.evidence
    )

    assert (
        gradients_off_by(run, Run(images(tmp_path / "whole", per_device_train_batch_size=8)))
        <= 1e-12
    )


class Noisy(nn.Module):
    """Scales what it gets by a number that Python or numpy draws, as augmentations in people's models do."""

    def __init__(self, norm: nn.Module, draw: Callable[[], float]) -> None:
        super().__init__()
        self.norm, self.draw = norm, draw

    def forward(self, hidden):
        hidden = self.norm(hidden)
        return hidden * (1 + self.draw()) if self.training else hidden


@pytest.mark.parametrize("kind", [np.random.MT19937, np.random.PCG64])
@pytest.mark.parametrize("draw", [random.random, np.random.random], ids=["python", "numpy"])
def test_what_any_generator_draws_is_held(tmp_path, draw, kind) -> None:
    trainer = small_trainer(tmp_path, with_norm(partial(Noisy, draw=draw)))
    survive_oom(trainer, ladder=())
    with numpy_draws_by(kind):
        Run(trainer, {0: [100]})
    (told,) = remarks(tmp_path, "out-of-memory-survived")
    assert "in training mode, but Noisy, which draws by numpy or Python" in told.finding.evidence


def test_what_numpy_draws_is_held_by_eval_mode_of_the_module_that_draws(tmp_path) -> None:
    """SpecAugment masks each row by numbers of numpy, which parts would draw in another order."""
    small = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
    }
    ears = {
        "conv_dim": (16,),
        "conv_kernel": (4,),
        "conv_stride": (4,),
        "num_conv_pos_embeddings": 4,
    }
    config = Wav2Vec2Config(
        **small, **ears, num_conv_pos_embedding_groups=2, num_feat_extract_layers=1, num_labels=3,
        mask_time_prob=0.5, mask_time_length=2, classifier_proj_size=8, feat_extract_norm="layer",
    )  # fmt: skip
    torch.manual_seed(0)
    dice = torch.Generator().manual_seed(0)
    rows = [
        {"input_values": torch.randn(400, generator=dice).double(), "labels": n % 3}
        for n in range(64)
    ]
    trainer = small_trainer(
        tmp_path,
        Wav2Vec2ForSequenceClassification(config).double(),
        train_dataset=rows,
        data_collator=None,
    )
    survive_oom(trainer, ladder=())
    Run(trainer, {0: [30]})
    (told,) = remarks(tmp_path, "out-of-memory-survived")
    assert (
        "in training mode, but Wav2Vec2Model, which draws by numpy or Python, without its children"
        in (told.finding.evidence)
    )
    assert all(module.training for module in trainer.model.modules())
