"""Losses whose parts have to know of the whole: ORPO, CPO and DPO with two means, and what compares rows."""

import math
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import ByT5Tokenizer, Trainer

from tests.models import tiny_llama
from tests.survival.failing import Run, gradients_by_rounding, numbers_off_by, survive
from tests.survival.ranks.half_full import HalfFull
from tests.survival.test_trl import PREFERENCES, dpo, made
from trainer_plugins import survive_oom
from trainer_plugins.survival.memo import memo_of

trl = pytest.importorskip("trl")
IS_FUSED = hasattr(trl.trainer.utils, "add_fused_lm_head")  # some TRL after 1.0
of_few_logits = pytest.mark.skipif(not IS_FUSED, reason="this TRL keeps all logits")


def small_llama(**sizes):
    return tiny_llama(vocab_size=384, max_position_embeddings=512, **sizes).double()


def orpo(tmp_path, **options):
    home = pytest.importorskip("trl.experimental.orpo")
    return made(home.ORPOTrainer, home.ORPOConfig, tmp_path, small_llama(), PREFERENCES, **options)


def cpo(tmp_path, **options):
    home = pytest.importorskip("trl.experimental.cpo")
    return made(home.CPOTrainer, home.CPOConfig, tmp_path, small_llama(), PREFERENCES, **options)


def dpo_sft(tmp_path, **options):
    return dpo(tmp_path, loss_type=["sigmoid", "sft"], loss_weights=[0.7, 2.0], **options)


def distilled(rows):
    """What `DataCollatorForChatML` makes, which takes no tokenizer of bytes."""
    tokenizer = ByT5Tokenizer(extra_ids=0, padding_side="left")
    prompts = tokenizer([row["prompt"] for row in rows], padding=True, return_tensors="pt")
    texts = tokenizer([row["prompt"] + row["chosen"] for row in rows])["input_ids"]
    nums = [len(tokenizer(row["prompt"])["input_ids"]) for row in rows]
    labels = [[-100] * num + text[num:] for num, text in zip(nums, texts, strict=True)]
    width = max(map(len, texts))
    tensors = {
        "input_ids": [[0] * (width - len(text)) + text for text in texts],
        "attention_mask": [[0] * (width - len(text)) + [1] * len(text) for text in texts],
        "labels": [[-100] * (width - len(label)) + label for label in labels],
        "prompts": prompts["input_ids"],
        "prompt_attention_mask": prompts["attention_mask"],
    }
    return {name: torch.as_tensor(value) for name, value in tensors.items()}


def gkd(tmp_path, **options):
    home = pytest.importorskip("trl.experimental.gkd")
    if not IS_FUSED:
        pytest.skip("the loss of this TRL's GKD depends on the longest prompt")
    teacher = small_llama()
    with torch.no_grad():
        teacher.model.norm.weight.mul_(0.9)
    more = {"teacher_model": teacher, "data_collator": distilled}
    options = {"max_length": 128, "max_new_tokens": 2, "lmbda": 1.0, **options}
    return made(
        home.GKDTrainer, home.GKDConfig, tmp_path, small_llama(), PREFERENCES, more, **options
    )


SOME = ("orpo", "simpo", "dpo sft", "kto", "aot")
TWO_MEANS: dict[str, tuple[Callable[..., Trainer], dict[str, Any]]] = {
    "orpo": (orpo, {"beta": 0.5}),
    "cpo": (cpo, {}),
    "cpo hinge": (cpo, {"loss_type": "hinge"}),
    "cpo ipo": (cpo, {"loss_type": "ipo"}),
    "simpo": (cpo, {"loss_type": "simpo", "cpo_alpha": 0.5}),
    "simpo alone": (cpo, {"loss_type": "simpo", "cpo_alpha": 0.0}),
    "alphapo": (cpo, {"loss_type": "alphapo", "alpha": 0.25}),
    "dpo sft": (dpo_sft, {}),
    "dpo bco_pair": (dpo, {"loss_type": ["bco_pair"]}),
    "gkd": (gkd, {}),
}


def kto(tmp_path, **options):
    columns = {"prompt": PREFERENCES["prompt"], "completion": PREFERENCES["chosen"]}
    reference = small_llama()
    with torch.no_grad():
        reference.model.norm.weight.mul_(0.9)
    options = {"beta": 2.0, **options}
    return made(
        trl.KTOTrainer,
        trl.KTOConfig,
        tmp_path,
        small_llama(attention_dropout=options.pop("dropout", 0.0)),
        {**columns, "label": lambda n: n % 3 == 0},
        {"ref_model": reference},
        **options,
    )


COMPARING: dict[str, tuple[Callable[..., Trainer], dict[str, Any]]] = {
    "kto": (kto, {}),
    "kto with an adapter": (kto, {"lora": {}}),
    "kto precomputed": (kto, {"precompute_ref_log_probs": True}),
    "kto apo": (kto, {"loss_type": "apo_zero_unpaired"}),
    "aot": (dpo, {"loss_type": ["aot"]}),
    "aot_unpaired and sft": (dpo, {"loss_type": ["aot_unpaired", "sft"]}),
}


@pytest.mark.all(unless=lambda name: name in SOME)
@pytest.mark.parametrize(
    "name", [*TWO_MEANS, *(pytest.param(name, marks=of_few_logits) for name in COMPARING)]
)
def test_gradients_and_metrics_are_those_of_the_whole(tmp_path, name: str) -> None:
    make, options = {**TWO_MEANS, **COMPARING}[name]
    last = 0.9 if make is gkd else 0.3  # what it generates before is not counted, but may fail
    whole, survived = survive(lambda: make(tmp_path, **options), {0: 0.8, 3: last})

    assert gradients_by_rounding(survived.gradients, whole.gradients) <= 1, "losses are in float32"
    for mine, theirs in zip(survived.logged, whole.logged, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-6)


def test_a_product_of_two_means_is_refused(tmp_path) -> None:
    trainer = dpo_sft(tmp_path, use_weighting=True)
    with pytest.raises(ValueError, match="use_weighting multiplies two means"):
        survive_oom(trainer)


class Refusing(HalfFull):
    """A card on which no more than so many tokens pass at once with gradients."""

    num_tokens = 120

    def look(self, module, args, kwargs):
        if torch.is_grad_enabled() and kwargs["input_ids"].numel() > self.num_tokens:
            raise torch.OutOfMemoryError("CUDA out of memory.")


@pytest.mark.parametrize("make", [pytest.param(kto, marks=of_few_logits), orpo])
@pytest.mark.all
def test_what_fits_is_found_before_step_1(tmp_path, make) -> None:
    whole, trainer, card = Run(make(tmp_path)), make(tmp_path), Refusing()
    trainer.model.model.register_forward_pre_hook(
        lambda module, args, kwargs: card.look(module, args, kwargs), with_kwargs=True
    )
    with patch("trainer_plugins.survival.memo.card_of", lambda _: card):
        survive_oom(trainer)
        survived = Run(trainer)

    assert not math.isinf(memo_of(trainer).limit)
    assert memo_of(trainer).num_survived == 0, "nothing failed in training"
    assert gradients_by_rounding(survived.gradients, whole.gradients) <= 1
    assert numbers_off_by(survived.logged, whole.logged) <= 1e-4
