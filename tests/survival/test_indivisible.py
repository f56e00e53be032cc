"""A part that cannot be computed, as with images spread unevenly over rows: the micro-batch is computed whole."""

from contextvars import ContextVar

import pytest
import torch
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
)

from tests.survival.failing import Run, know_limit, off_by_steps, refuse, small_trainer, survive
from trainer_plugins import survive_oom

IMAGE, PATCHES = 120, 4
EVEN = (1, 1, 1, 1)


def has_gradient(run: Run) -> list[list]:
    """But for parameters whose gradient is rounding alone, as that of a bias of keys."""
    return [
        [g for g in step if g is not None and float(g.abs().max()) > 1e-12]
        for step in run.gradients
    ]


def llava():
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**sizes, image_size=8, patch_size=4, projection_dim=16),
        text_config=LlamaConfig(vocab_size=128, **sizes, pad_token_id=0),
        image_token_index=IMAGE,
        vision_feature_layer=-1,
    )
    return LlavaForConditionalGeneration(config).double()


def rows_with(counts: tuple[int, ...], dice: torch.Generator) -> dict[str, torch.Tensor]:
    """As many images as rows, but so many of them in each row."""
    ids = torch.randint(1, 100, (len(counts), 6 + 2 * PATCHES), generator=dice)
    for row, count in zip(ids, counts, strict=True):
        row[1 : 1 + PATCHES * count] = IMAGE
    images = torch.randn(len(counts), 3, 8, 8, generator=dice, dtype=torch.float64)
    return {"input_ids": ids, "labels": ids.masked_fill(ids == IMAGE, -100), "pixel_values": images}


def trainer_on(tmp_path, *batches: tuple[int, ...], **kwargs):
    dice, upcoming = torch.Generator().manual_seed(2), iter([*batches, *[EVEN] * 8])
    return small_trainer(
        tmp_path, llava(), data_collator=lambda rows: rows_with(next(upcoming), dice), **kwargs
    )


WHOLE_FAILS, HALF_FAILS = (1, 2, 0, 1), (1, 1, 2, 0)


@pytest.mark.parametrize(
    "counts", [WHOLE_FAILS, HALF_FAILS], ids=["in the first part", "in the third"]
)
@pytest.mark.parametrize("at", [0.3, 0.5, 0.7, 0.9])
@pytest.mark.all(but=3)
def test_a_part_that_cannot_be_computed_is_taken_back(tmp_path, counts, at: float) -> None:
    """The second micro-batch fails; or half of it does, as the first had set a limit.

    Then a part of it raises.
    """
    where = {1: at} if counts == WHOLE_FAILS else {0: 0.5, 1: at}
    whole, survived = survive(lambda: trainer_on(tmp_path, EVEN, counts), where)

    assert off_by_steps(has_gradient(survived), has_gradient(whole)) <= 1e-5, (
        "transformers takes the loss in float32"
    )


def test_one_that_is_divided_beforehand_goes_on_as_it_would_have(tmp_path) -> None:
    whole = Run(trainer_on(tmp_path, EVEN, (1, 1, 2, 0)))
    trainer = trainer_on(tmp_path, EVEN, (1, 1, 2, 0))
    survive_oom(trainer)

    know_limit(trainer, 14, "step_begin")
    assert off_by_steps(has_gradient(Run(trainer)), has_gradient(whole)) <= 1e-5


def test_where_the_whole_does_not_fit_the_error_keeps_its_words(tmp_path) -> None:
    half = Run(trainer_on(tmp_path, EVEN, (1, 2, 0, 1))).num_allocations[1] // 2
    trainer = trainer_on(tmp_path, EVEN, (1, 2, 0, 1))
    why = r"(?s)^CUDA out of memory.*a part of it raised "
    refuse(trainer, why, {0: [half], 1: [half]}, ladder=())


def test_an_evaluation_batch_says_what_did_not_fit(tmp_path) -> None:
    trainer = trainer_on(tmp_path, (1, 2, 0, 1), eval_dataset=[{}] * 4)
    survive_oom(trainer)
    embed, has_failed = (
        trainer.model.get_input_embeddings(),
        ContextVar("has_failed", default=False),
    )

    def fail(module, args):
        if not has_failed.get():  # survival would take back what a list keeps
            has_failed.set(True)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")

    embed.register_forward_pre_hook(fail)
    with pytest.raises(
        torch.OutOfMemoryError, match=r"(?s)^CUDA out of memory.*a part of it raised "
    ):
        trainer.evaluate()
