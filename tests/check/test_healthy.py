"""Healthy runs pass the check with nothing above INFO, and no check fails; ZeRO-3, FSDP2 and DDP do in tests/distributed."""

import logging
import random
from dataclasses import fields

import numpy as np
import pytest
import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    ByT5Tokenizer,
    DataCollatorForSeq2Seq,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForSequenceClassification,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
)

from tests.models import QUIET, checkpointing, tiny_llama, tiny_t5, token_rows
from trainer_plugins import Preflight, protect

trl = pytest.importorskip("trl")
peft = pytest.importorskip("peft")
datasets = pytest.importorskip("datasets")

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4}
EVALUATES = {"eval_strategy": "steps", "eval_steps": 1}


def language_model(make):
    return make()


def checkpointing_evaluation_and_saves(make):
    return make(gradient_checkpointing=True, save_strategy="steps", save_steps=1, **EVALUATES)


def tied_weights(make):
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 128, "n_positions": 64}
    return make(model=GPT2LMHeadModel(GPT2Config(**sizes)))


def words_to_words(make):
    return make(
        model=tiny_t5(), trainer_class=Seq2SeqTrainer, args_class=Seq2SeqTrainingArguments,
        predict_with_generate=True, generation_max_length=8, **EVALUATES,
    )  # fmt: skip


def classes_with_metrics(make):
    model = BertForSequenceClassification(
        BertConfig(vocab_size=128, num_labels=3, **SIZES, **HEADS)
    )
    trainer = make(model=model, **EVALUATES)
    rows = [{**row, "labels": number % 3} for number, row in enumerate(token_rows())]
    trainer.train_dataset, trainer.eval_dataset = rows, rows[:8]
    trainer.compute_metrics = lambda outputs: {"rows": len(outputs.predictions)}
    return trainer


def pictures(make):
    config = ViTConfig(image_size=8, patch_size=4, num_labels=3, **SIZES, **HEADS)
    trainer = make(model=ViTForImageClassification(config), **EVALUATES)
    rows = [{"pixel_values": torch.rand(3, 8, 8), "labels": number % 3} for number in range(16)]
    trainer.train_dataset = trainer.eval_dataset = rows
    return trainer


def adapters(make):
    model = peft.get_peft_model(tiny_llama(), peft.LoraConfig(target_modules="all-linear"))
    return make(model=model, bf16=True, **checkpointing(reentrant=False))


def a_stream(make):
    trainer = make()
    trainer.train_dataset = datasets.Dataset.from_list(text_rows(16)).to_iterable_dataset()
    return trainer


def grouped_by_length(make):
    old = "group_by_length" in {field.name for field in fields(TrainingArguments)}
    how = {"group_by_length": True} if old else {"train_sampling_strategy": "group_by_length"}
    trainer = make(per_device_train_batch_size=4, **how)
    rows = [{"input_ids": [1] * n, "labels": [1] * n} for n in [4] * 150 + [30] * 50]
    trainer.train_dataset = datasets.Dataset.from_list(rows)
    trainer.data_collator = DataCollatorForSeq2Seq(ByT5Tokenizer(extra_ids=0))
    return trainer


def protected(make):
    trainer = make(**EVALUATES)
    protect(trainer)
    return trainer


def text_rows(num):
    return [{"input_ids": [1 + n % 9] * 16, "labels": [1 + n % 9] * 16} for n in range(num)]


def of_trl(make, trainer_class, config, rows, model=None, **more):
    settings = {"max_steps": 1, "per_device_train_batch_size": 2, "bf16": False, **QUIET}
    args = config(make().args.output_dir, **settings)
    return trainer_class(
        model=model or tiny_llama(vocab_size=384), args=args,
        train_dataset=datasets.Dataset.from_list(rows), processing_class=ByT5Tokenizer(extra_ids=0), **more,
    )  # fmt: skip


PAIRS = [{"prompt": "a stone ", "chosen": "is a stone", "rejected": "is not"}] * 8
LORA = {"target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}


def trl_sft(make):
    return of_trl(make, trl.SFTTrainer, trl.SFTConfig, [{"text": "a stone is a stone"}] * 8)


def trl_sft_with_adapters(make):
    rows, config = [{"text": "a stone is a stone"}] * 8, peft.LoraConfig(**LORA)
    return of_trl(make, trl.SFTTrainer, trl.SFTConfig, rows, peft_config=config)


def trl_dpo_with_adapters(make):
    config = peft.LoraConfig(**LORA)
    return of_trl(make, trl.DPOTrainer, trl.DPOConfig, PAIRS, peft_config=config)


def trl_reward(make):
    sizes = {**SIZES, **HEADS, "vocab_size": 384, "pad_token_id": 0}
    model = LlamaForSequenceClassification(LlamaConfig(num_labels=1, **sizes))
    return of_trl(make, trl.RewardTrainer, trl.RewardConfig, PAIRS, model=model)


HEALTHY = [
    language_model, checkpointing_evaluation_and_saves, tied_weights, words_to_words,
    classes_with_metrics, pictures, adapters, a_stream, grouped_by_length, protected, trl_sft,
    trl_sft_with_adapters, trl_dpo_with_adapters, trl_reward,
]  # fmt: skip


@pytest.mark.parametrize("healthy", HEALTHY, ids=lambda run: run.__name__)
def test_a_healthy_run_passes(healthy, make_trainer, simgpu, caplog) -> None:
    trainer = healthy(lambda *args, **more: make_trainer(*args, **{"max_steps": 1, **more}))
    trainer.add_callback(Preflight("warning"))
    with caplog.at_level(logging.INFO, logger="trainer_plugins"):
        trainer.train()

    assert trainer.state.global_step == 1
    assert trainer.args.device.type == "simgpu"
    assert "check-not-made" not in caplog.text
    assert "Preflight failed" not in caplog.text
    assert ("data-not-seen" in caplog.text) == (healthy is a_stream)


def test_on_the_cpu_too(make_trainer, caplog) -> None:
    trainer = make_trainer(Preflight("warning"), max_steps=1, use_cpu=True, eval_strategy="epoch")
    with caplog.at_level(logging.INFO, logger="trainer_plugins"):
        trainer.train()
    assert trainer.state.global_step == 1
    assert "check-not-made" not in caplog.text


class Augments(torch.utils.data.Dataset):
    """Replaces a token of each row that it gives, drawn from a generator of its own."""

    def __init__(self) -> None:
        dice, self.draw = np.random.default_rng(0), random.Random(0).random
        self.token = lambda: int(dice.integers(1, 127))

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        ids = [self.token(), 1 + int(126 * self.draw()), *range(1, 7)]
        return {"input_ids": ids, "labels": ids}


def test_what_a_data_set_draws_is_what_it_would_have_drawn(make_trainer) -> None:
    def train(*callbacks: Preflight) -> list[float]:
        trainer = make_trainer(*callbacks, use_cpu=True, logging_strategy="steps", logging_steps=1)
        trainer.train_dataset = torch.utils.data.Subset(Augments(), range(32))
        trainer.train()
        return [logs["grad_norm"] for logs in trainer.state.log_history if "grad_norm" in logs]

    assert train(Preflight()) == train()
