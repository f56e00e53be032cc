"""Exact for every kind of model, loss and batch that is allowed: one failure in a backward, one in a forward pass."""

import itertools

import pytest
import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BioGptConfig,
    BioGptForTokenClassification,
    DataCollatorWithFlattening,
    LlamaConfig,
    LlamaForQuestionAnswering,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    ResNetConfig,
    ResNetForImageClassification,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    ViTConfig,
    ViTForImageClassification,
)

from tests.models import checkpointing, tiny_llama, tiny_t5
from tests.survival.failing import (
    Run,
    gradients_by_rounding,
    gradients_off_by,
    off_by,
    padded,
    ragged_rows,
    small_trainer,
    survive,
    weights_by_rounding,
)

SMALL = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "pad_token_id": 0,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
}

WITHOUT_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def seeded(make, *args, **kwargs):
    torch.manual_seed(0)
    model = make(*args, **kwargs).double()
    for name, parameter in model.named_parameters():
        # The gradient of this bias is 0: what is left of it is rounding, and Adam makes steps of
        # that.
        parameter.requires_grad_(not name.endswith(("key.bias", "k_proj.bias")))
    return model


def labelled(label):
    def collate(rows):
        batch = padded(rows)
        return {**batch, "labels": label(batch["input_ids"])}

    return collate


def causal(tmp_path, **kwargs):
    return small_trainer(tmp_path, **kwargs)


def label_smoothing(tmp_path):
    return small_trainer(tmp_path, label_smoothing_factor=0.1)


def mean_over_tokens(tmp_path):
    model = tiny_llama().double()
    model.accepts_loss_kwargs = False
    return small_trainer(tmp_path, model)


def tied(tmp_path):
    return small_trainer(tmp_path, tiny_llama(tie_word_embeddings=True).double())


def partly_frozen(tmp_path):
    model = tiny_llama().double()
    for parameter in (*model.model.embed_tokens.parameters(), *model.model.layers[0].parameters()):
        parameter.requires_grad_(False)
    return small_trainer(tmp_path, model)


def lora(tmp_path, **kwargs):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    torch.manual_seed(0)
    return small_trainer(tmp_path, peft.get_peft_model(tiny_llama(), config).double(), **kwargs)


def lora_reentrant(tmp_path):
    trainer = lora(tmp_path, **checkpointing(reentrant=True))
    trainer.model.enable_input_require_grads()
    return trainer


def packed(tmp_path):
    rows = [{"input_ids": row["input_ids"].tolist()} for row in ragged_rows()]
    # With a cache, transformers before 5 lets packed sequences look at each other (and the
    # certificate refuses that).
    model = tiny_llama(attn_implementation="eager", use_cache=False).double()
    return small_trainer(
        tmp_path, model, train_dataset=rows, data_collator=DataCollatorWithFlattening()
    )


def classes(tmp_path):
    model = seeded(LlamaForSequenceClassification, LlamaConfig(**SMALL, num_labels=3))
    return small_trainer(tmp_path, model, data_collator=labelled(lambda ids: ids[:, 0] % 3))


def classes_of_some_rows(tmp_path):
    """The loss is a mean over the rows that have a class."""

    def label(ids):
        return torch.where(torch.arange(len(ids)) % 4 == 1, -100, ids[:, 0] % 3)

    model = seeded(LlamaForSequenceClassification, LlamaConfig(**SMALL, num_labels=3))
    return small_trainer(tmp_path, model, data_collator=labelled(label))


def several_labels(tmp_path):
    config = LlamaConfig(**SMALL, num_labels=3, problem_type="multi_label_classification")
    model = seeded(LlamaForSequenceClassification, config)
    return small_trainer(
        tmp_path, model, data_collator=labelled(lambda ids: (ids[:, :3] % 2).double())
    )


def regression(tmp_path):
    model = seeded(LlamaForSequenceClassification, LlamaConfig(**SMALL, num_labels=1))
    return small_trainer(
        tmp_path, model, data_collator=labelled(lambda ids: ids[:, 0].double() / 128)
    )


def token_classes(tmp_path):
    model = seeded(LlamaForTokenClassification, LlamaConfig(**SMALL, num_labels=3))
    labels = labelled(lambda ids: torch.where(ids > 0, ids % 3, -100))
    return small_trainer(tmp_path, model, data_collator=labels)


def token_classes_of_padding(tmp_path):
    """BioGPT leaves out what its attention mask hides; its labels there are none that a loss ignores."""
    model = seeded(
        BioGptForTokenClassification, BioGptConfig(**{**SMALL, **WITHOUT_DROPOUT}, num_labels=3)
    )
    return small_trainer(tmp_path, model, data_collator=labelled(lambda ids: ids % 3))


def regression_with_a_hundred_below_zero(tmp_path):
    """A target as any other, though a class of that number would be ignored; none in the batch that is measured."""
    model = seeded(LlamaForSequenceClassification, LlamaConfig(**SMALL, num_labels=1))
    batches = itertools.count()

    def label(ids):
        targets = ids[:, 0].double() / 128
        targets[0] = -100.0 if next(batches) else 0.0
        return targets

    return small_trainer(tmp_path, model, data_collator=labelled(label))


class FrozenForImageClassification(ResNetForImageClassification):
    def train(self, mode: bool = True):
        super().train(mode)
        for module in self.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                module.eval()
        return self


def frozen_norms(tmp_path):
    config = ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1], layer_type="basic", num_labels=3
    )
    model = seeded(FrozenForImageClassification, config)
    return small_trainer(tmp_path, model, train_dataset=pictures(32), data_collator=None)


def masked_words(tmp_path):
    sizes = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = BertConfig(
        **sizes, num_attention_heads=4, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    labels = labelled(lambda ids: torch.where(ids % 3 == 1, ids, -100))
    return small_trainer(tmp_path, seeded(BertForMaskedLM, config), data_collator=labels)


def images(tmp_path, **options):
    sizes = {"num_attention_heads": 4, "image_size": 8, "patch_size": 4, "num_labels": 3}
    names = ("hidden_size", "intermediate_size", "num_hidden_layers")
    config = ViTConfig(**sizes, **{name: SMALL[name] for name in names})
    model = seeded(ViTForImageClassification, config)
    return small_trainer(tmp_path, model, train_dataset=pictures(), data_collator=None, **options)


def pictures(size: int = 8):
    dice = torch.Generator().manual_seed(0)
    return [
        {"pixel_values": torch.rand(3, size, size, generator=dice).double(), "labels": n % 3}
        for n in range(64)
    ]


def encoder_decoder(tmp_path, **options):
    model = seeded(tiny_t5, dropout_rate=0.0)
    return small_trainer(tmp_path, model, Seq2SeqTrainer, Seq2SeqTrainingArguments, **options)


def shared_positions(tmp_path):
    """As a collator makes them that gives one row of positions for all."""

    def collate(rows):
        batch = padded(rows)
        return {**batch, "position_ids": torch.arange(batch["input_ids"].size(1))[None] + 1}

    return small_trainer(tmp_path, data_collator=collate)


def answers(tmp_path):
    """As run_qa trains; an answer beyond the end of its row is not counted."""
    model = seeded(LlamaForQuestionAnswering, LlamaConfig(**SMALL))
    model.qa_outputs.bias.requires_grad = False  # it moves no softmax: its gradient is rounding

    def collate(rows):
        batch = padded(rows)
        starts = batch.pop("labels")[:, 0] % 8
        starts[-1] = batch["input_ids"].size(1)
        return {**batch, "start_positions": starts, "end_positions": starts + 1}

    return small_trainer(tmp_path, model, data_collator=collate)


FAMILIES = (
    *(shared_positions, answers),
    *(classes_of_some_rows, label_smoothing),
    *(causal, mean_over_tokens, tied, partly_frozen, lora, lora_reentrant, packed),
    *(classes, several_labels, regression, token_classes, masked_words, images, encoder_decoder),
    *(token_classes_of_padding, regression_with_a_hundred_below_zero, frozen_norms),
)
# Their mean, or the softmax of their attention, is taken in float32 whatever the model is in.
IN_FLOAT32 = (mean_over_tokens, packed, token_classes, label_smoothing)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__)
@pytest.mark.all(but=6)
def test_gradients_weights_and_logs_are_those_of_the_whole(tmp_path, family) -> None:
    whole, survived = survive(lambda: family(tmp_path), {0: 0.8, 3: 0.3})

    is_exact = family not in IN_FLOAT32
    if is_exact:
        assert gradients_off_by(survived, whole) <= 1e-12
        assert off_by(survived.weights, whole.weights) <= 1e-12
    else:
        assert gradients_by_rounding(survived.gradients, whole.gradients) <= 1
        assert weights_by_rounding(survived.weights, whole.weights, steps=2) <= 1
    assert survived.logged == [pytest.approx(logs, rel=1e-6) for logs in whole.logged]


@pytest.mark.parametrize("accumulation", [1, 4, 7])
def test_a_last_window_that_is_not_full(tmp_path, accumulation: int) -> None:
    # Ten micro-batches: the last window has 2, or 3, of 4 or 7. The failure is in its last.
    def make():
        settings = {"steps": -1, "num_train_epochs": 1, "gradient_accumulation_steps": accumulation}
        return causal(tmp_path, train_dataset=ragged_rows(40), **settings)

    whole, survived = survive(make, {9: 0.8})

    assert len(whole.gradients) == -(-10 // accumulation)
    assert gradients_off_by(survived, whole) <= 1e-12
    assert survived.logged == [pytest.approx(logs, rel=1e-6) for logs in whole.logged]


def test_a_mean_over_tokens_with_rows_that_have_none(tmp_path) -> None:
    def every_second(rows):
        batch = padded(rows)
        batch["labels"][::2] = -100
        return batch

    def make():
        trainer = small_trainer(tmp_path, data_collator=every_second)
        trainer.model_accepts_loss_kwargs = False
        return trainer

    # At a limit of one row, two of the four pieces have nothing to learn from: their mean would be
    # 0 / 0.
    whole, survived = survive(make, {0: 0.5, 1: 0.25})

    assert gradients_by_rounding(survived.gradients, whole.gradients) <= 1, (
        "the mean is taken in float32"
    )
    assert survived.logged == [pytest.approx(logs, rel=1e-6) for logs in whole.logged]


def test_several_failures_in_one_micro_batch(tmp_path) -> None:
    # The whole in its backward pass, later a half in its own, then one of its quarters.
    whole, survived = survive(
        lambda: causal(tmp_path, per_device_train_batch_size=8), {0: 0.9, 1: (0.8, 1.6)}
    )

    assert gradients_off_by(survived, whole) <= 1e-12


def test_dropout_is_drawn_again_from_the_same_state(tmp_path) -> None:
    def make():
        return causal(tmp_path, model=tiny_llama(attention_dropout=0.2).double())

    whole, once = survive(make, {0: 0.8, 3: 0.3})
    _, again = survive(make, {0: 0.8, 3: 0.3})

    assert gradients_off_by(once, again) == 0
    assert gradients_off_by(once, whole) > 1e-6, "other masks, of the same distribution"


def test_one_row_computed_again_draws_the_same_masks(tmp_path) -> None:
    def make():
        return causal(
            tmp_path,
            model=tiny_llama(attention_dropout=0.2).double(),
            per_device_train_batch_size=1,
        )

    # One row cannot be divided: with checkpointing it is computed again as it was.
    whole, survived = survive(make, {0: 0.9})

    assert gradients_off_by(survived, whole) <= 1e-12


def test_bf16_autocast(tmp_path) -> None:
    def make():
        return causal(tmp_path, model=tiny_llama(), bf16=True)

    whole, survived = survive(make, {0: 0.8, 3: 0.3})
    other_size = Run(causal(tmp_path, model=tiny_llama(), bf16=True, per_device_train_batch_size=2,
                            gradient_accumulation_steps=4))  # fmt: skip

    # What rounding makes of another micro-batch anyway is the measure.
    assert gradients_off_by(survived, whole) <= 2 * gradients_off_by(other_size, whole)


def with_scaler(tmp_path, scale: float, **settings) -> Trainer:
    """accelerate takes the fp16 of cards only: what it would set there is set here."""
    trainer = causal(tmp_path, model=tiny_llama(), fp16=True, **settings)
    trainer.accelerator.native_amp = True
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=3)
    return trainer


def test_fp16_with_a_scaled_loss(tmp_path) -> None:
    whole, survived = survive(lambda: with_scaler(tmp_path, 2.0**10, steps=3), {0: 0.8, 3: 0.3})
    other_size = Run(
        with_scaler(
            tmp_path, 2.0**10, steps=3, per_device_train_batch_size=2, gradient_accumulation_steps=4
        )
    )

    assert survived.trainer.accelerator.scaler.get_scale() == 2.0**11, (
        "no step was passed over, and it grew once"
    )
    assert gradients_off_by(other_size, whole) > 1e-5, "it was computed in half precision"
    assert whole.trainer.accelerator.scaler.get_scale() == 2.0**11
    assert gradients_off_by(survived, whole) <= 2 * gradients_off_by(other_size, whole)


def test_a_step_whose_scaled_gradients_overflow_is_passed_over_as_ever(tmp_path) -> None:
    whole, survived = survive(lambda: with_scaler(tmp_path, 2.0**40, steps=3), {0: 0.8, 3: 0.3})

    assert (
        survived.trainer.accelerator.scaler.get_scale()
        == whole.trainer.accelerator.scaler.get_scale()
        < 2.0**40
    )
    for ours, theirs in zip(survived.weights, whole.weights, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-4)


class AutocastAround(Trainer):
    """Autocast in effect from one piece to the next, with its cache of cast weights."""

    def compute_loss_context_manager(self):
        return torch.autocast("cpu", torch.bfloat16)


def test_a_cast_weight_does_not_remember_that_it_needed_a_gradient(tmp_path) -> None:
    def make():
        return small_trainer(tmp_path, tiny_llama(), AutocastAround)

    # The first divides, and then a piece of the second fails when a part of its gradients is final.
    whole, survived = survive(make, {0: 0.25, 1: 0.8})
    assert gradients_off_by(survived, whole) <= 0.05
