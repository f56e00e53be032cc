"""Losses that compare each row with the others: CLIP's, and those of sentence-transformers."""

from contextvars import ContextVar

import pytest
import torch
from transformers import (
    CLIPConfig,
    CLIPModel,
    SiglipConfig,
    SiglipModel,
)

from tests.models import IS_OLD
from tests.survival.failing import Run, know_limit, numbers_off_by, small_trainer, survive
from trainer_plugins import survive_oom

TEXT = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "max_position_embeddings": 32}  # fmt: skip
VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
          "num_attention_heads": 4, "image_size": 8, "patch_size": 4}  # fmt: skip


def clip(dropout: float = 0.0):
    torch.manual_seed(0)
    text = {**TEXT, "eos_token_id": 2, "projection_dim": 16, "attention_dropout": dropout}
    vision = {**VISION, "projection_dim": 16, "attention_dropout": dropout}
    return CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)).double()


def siglip():
    torch.manual_seed(0)
    return SiglipModel(SiglipConfig(text_config=TEXT, vision_config=VISION)).double()


def images_and_texts(rows):
    ids = [row["input_ids"][:10] for row in rows]
    padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
    pixels = [torch.outer(one.double()[:6].sin(), torch.arange(32.0).cos()) for one in ids]
    return {
        "input_ids": padded,
        "attention_mask": (padded != 0).long(),
        "pixel_values": torch.stack(pixels).reshape(-1, 3, 8, 8),
        "return_loss": True,
    }


def contrastive(tmp_path, model, **options):
    return small_trainer(tmp_path, model, data_collator=images_and_texts, **options)


def off_by_largest(ours: list, theirs: list) -> float:
    """Relative to the largest gradient: that of the bias of keys is nothing but rounding."""
    largest = max(float(g.abs().max()) for g in theirs)
    return max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True)) / largest


# transformers 4 cannot mask CLIP in float64 under a dispatch mode.
@pytest.mark.parametrize("make", [siglip] if IS_OLD else [clip, siglip])
def test_pictures_and_texts(tmp_path, make) -> None:
    whole, survived = survive(lambda: contrastive(tmp_path, make()), {0: 0.8, 3: 0.3})

    assert max(map(off_by_largest, survived.gradients, whole.gradients)) <= 1e-12
    assert numbers_off_by(survived.logged, whole.logged) <= 1e-6


@pytest.mark.all
def test_wherever_it_fails(tmp_path) -> None:
    """In the pass without gradients, in that of a piece, and again after a piece was divided."""
    whole = Run(contrastive(tmp_path, clip(), steps=1))
    for at in range(3, whole.num_allocations[0], 8):
        trainer = contrastive(tmp_path, clip(), steps=1)
        survive_oom(trainer, ladder=())
        survived = Run(trainer, {0: [at], 1: [at + 12]})  # what a batch is looked at comes before

        assert survived.allocations.num_failed == 2
        assert off_by_largest(survived.gradients[0], whole.gradients[0]) <= 1e-12, at


@pytest.mark.skipif(IS_OLD, reason="transformers 4 cannot mask CLIP in float64")
def test_a_piece_draws_the_same_masks_in_both_of_its_passes(tmp_path) -> None:
    trainer = contrastive(tmp_path, clip(dropout=0.5), steps=1)
    seen: ContextVar[dict[bool, list[torch.Tensor]]] = ContextVar(
        "seen"
    )  # survival looks into lists
    seen.set({False: [], True: []})
    survive_oom(trainer)
    know_limit(trainer, 20)  # two rows at once, so that nothing fails
    model = trainer.model
    model.train()
    for tower in (model.text_model, model.vision_model):
        last = tower.encoder.layers[-1]
        last.register_forward_hook(
            lambda module, _, out: seen.get()[torch.is_grad_enabled()].append(out.detach())
        )
    trainer.train()

    # Of two towers and two pieces, in the second micro-batch: in the first one it is measured.
    without, again = (
        [float(out.sum()) for out in seen.get()[is_again][-4:]] for is_again in (False, True)
    )
    assert len({*without}) == 4
    assert {*again} == {*without}, "to the last bit"
