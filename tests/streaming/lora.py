"""LoRA runs small enough to train in a blink, whose base is most of what is on the card."""

from typing import Any

import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import Trainer, TrainingArguments

from tests.models import QUIET
from trainer_plugins.streaming.stream import Stream, stream_of

SIZES = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 6, "vocab_size": 256}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}


LARGE = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 12}
"""A base of 33 MiB."""


def base(**config) -> transformers.LlamaForCausalLM:
    """Six layers of 0.7 MiB; the same weights every time."""
    torch.manual_seed(0)
    sizes = {**SIZES, **HEADS, "pad_token_id": 0, "attention_dropout": 0.1, **config}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))


def adapted(model: Any = None, **lora) -> PeftModel:
    """With adapters that matter from the first step: by themselves they begin with zeros."""
    torch.manual_seed(1)
    settings = {"r": 4, "target_modules": "all-linear", "lora_dropout": 0.1, **lora}
    model = model if model is not None else base()
    model.enable_input_require_grads()  # for reentrant checkpointing
    model = get_peft_model(model, LoraConfig(**settings))
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(weight.data, std=0.02)
    return model


def rows(num_rows: int = 32, length: int = 48) -> list[dict[str, torch.Tensor]]:
    """Rows of unequal length, padded, with a real mask."""
    dice = torch.Generator().manual_seed(2)
    made = []
    for number in range(num_rows):
        ids = torch.randint(1, 256, (length,), generator=dice)
        there = torch.arange(length) < length - number % 7
        ids = torch.where(there, ids, 0)
        labels = torch.where(there, ids, -100)
        made.append({"input_ids": ids, "attention_mask": there.long(), "labels": labels})
    return made


def trainer(folder, *callbacks, model=None, trainer_class=Trainer, **arguments) -> Trainer:
    """Five steps of AdamW over two rows, unless asked otherwise."""
    settings = {
        "max_steps": 5,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        **QUIET,
        "seed": 3,
        **arguments,
    }
    return trainer_class(
        model=model if model is not None else adapted(),
        args=TrainingArguments(str(folder), **settings),
        train_dataset=rows(),
        eval_dataset=rows(6),
        callbacks=list(callbacks),
    )


def stream(trained: Trainer) -> Stream:
    """What streams the base of its model, which is streamed."""
    found = stream_of(trained.model)
    assert found is not None
    return found


def losses(trained: Trainer) -> list[float]:
    return [line["loss"] for line in trained.state.log_history if "loss" in line]


def learned(trained: Trainer) -> dict[str, torch.Tensor]:
    """All that was trained, in main memory."""
    return {
        name: weight.detach().cpu().clone()
        for name, weight in trained.model.named_parameters()
        if weight.requires_grad
    }


def learn(running: Trainer) -> dict[str, torch.Tensor]:
    """Train; what was learned is all that is kept of the run."""
    running.train()
    return learned(running)


def are_equal(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> bool:
    """Bit for bit, and under the same names."""
    return some.keys() == others.keys() and all(
        torch.equal(some[name].cpu(), others[name].cpu()) for name in some
    )
