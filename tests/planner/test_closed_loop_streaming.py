"""A streamed base: predicted, then really run on the simulated card, and compare.

The base is most of each model, so that a layer more or less on the card would be seen.
"""

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    TrainerCallback,
)

from tests.planner.loop import Loop
from tests.planner.test_closed_loop import run
from tests.processes import ENDS_A_HANG
from trainer_plugins import MemoryPlan, StreamBase
from trainer_plugins.planner.predict import predict_all
from trainer_plugins.planner.rehearse.gather import request_of
from trainer_plugins.planner.request import ConfigSource, PlanRequest
from trainer_plugins.units import GIB

peft = pytest.importorskip("peft")

VOCABULARY = 300
REENTRANT: dict[str, Any] = {
    "gradient_checkpointing": True,
    "gradient_checkpointing_kwargs": {"use_reentrant": True},
}
CHECKPOINTING: dict[str, Any] = {
    "gradient_checkpointing": True,
    "gradient_checkpointing_kwargs": {"use_reentrant": False},
}
ACCUMULATION: dict[str, Any] = {"gradient_accumulation_steps": 3}
AUTOCAST: dict[str, Any] = {"bf16": True}


def with_lora(model, dropout: float):
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_modules="all-linear", lora_dropout=dropout)
    if transformers.__version__.startswith("4."):  # later ones do it for reentrant checkpointing
        model.enable_input_require_grads()
    return peft.get_peft_model(model, config)


def llama() -> LlamaForCausalLM:
    sizes = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, pad_token_id=0, **sizes, **heads))


def gpt2() -> GPT2LMHeadModel:
    sizes = {"n_embd": 192, "n_layer": 4, "n_head": 4, "n_positions": 64}
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, **sizes))


def t5() -> T5ForConditionalGeneration:
    sizes = {"d_model": 192, "d_kv": 48, "d_ff": 512, "num_layers": 3, "num_heads": 4}
    ids = {"decoder_start_token_id": 0, "pad_token_id": 0}
    return T5ForConditionalGeneration(T5Config(vocab_size=VOCABULARY, **sizes, **ids))


def rows() -> list[dict[str, torch.Tensor]]:
    tokens = torch.randint(1, VOCABULARY, (36, 32), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in tokens]


def streamed(model, layers: int, dropout: float = 0.0, embeddings: bool = False, **arguments):
    def make(folder):
        return run(
            folder,
            with_lora(model(), dropout),
            data=rows(),
            callbacks=[StreamBase(layers, embeddings, on_refusal="error")],
            per_device_train_batch_size=4,
            **arguments,
        )

    return make


RUNS = {
    "two layers": streamed(llama, 2, 0.1, **ACCUMULATION),
    "three layers": streamed(llama, 3),
    "checkpointing": streamed(llama, 1, 0.1, **CHECKPOINTING),
    "checkpointing, accumulation": streamed(llama, 2, **CHECKPOINTING, **ACCUMULATION),
    "reentrant": streamed(llama, 2, 0.1, **REENTRANT),
    "reentrant, accumulation": streamed(llama, 1, **REENTRANT, **ACCUMULATION),
    "autocast": streamed(llama, 1, 0.1, **AUTOCAST),
    "embeddings": streamed(llama, 2, embeddings=True, **CHECKPOINTING),
    "gpt2": streamed(gpt2, 2, 0.1, **ACCUMULATION),
    "t5, checkpointing": streamed(t5, 3, **CHECKPOINTING),
}
LOOP = Loop(RUNS)


@pytest.mark.all(unless=lambda name: name == "two layers")
@pytest.mark.parametrize("name", RUNS)
def test_the_card_holds_what_was_predicted(simgpu, tmp_path, name):
    plan = LOOP.goes_round(name, tmp_path)

    assert plan.streamed is not None
    assert plan.breakdown["frozen weights"] < 0.9 * plan.streamed.num_bytes


class Peaks(TrainerCallback):
    """What the card holds at most while a run saves, and while one resumes."""

    def __init__(self) -> None:
        self.found: dict[str, int] = {}

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        self.found["resume"] = torch.accelerator.max_memory_allocated()

    def on_step_end(self, args, state, control, **kwargs) -> None:
        torch.accelerator.reset_peak_memory_stats()

    def on_save(self, args, state, control, **kwargs) -> None:
        self.found["save"] = torch.accelerator.max_memory_allocated()


SAVES: dict[str, Any] = {**CHECKPOINTING, "save_strategy": "steps", "save_steps": 3}


def as_config(trainer) -> PlanRequest:
    model = trainer.model.get_base_model()
    flags = ("--output_dir", "runs", "--save_strategy", "steps", "--gradient_checkpointing", "True")
    lora = trainer.model.peft_config["default"]
    adapter = {"peft_type": "LORA", "r": lora.r, "target_modules": sorted(lora.target_modules)}
    source = ConfigSource(
        config=model.config.to_dict(),
        arguments=(*flags, "--per_device_train_batch_size", "4"),
        sequence_length=32,
        dtype="float32",
        peft=adapter,
    )
    asked = request_of(trainer, None, "", 1, None)
    return replace(asked, source=source, has_padding=False)


@pytest.mark.all
def test_a_streamed_run_saves_and_resumes_without_its_base(simgpu, tmp_path):
    simgpu.set_capacity(4 * GIB)
    held, saved, resumed = torch.accelerator.memory_allocated(), Peaks(), Peaks()
    make = streamed(llama, 2, **SAVES)
    trainer = make(tmp_path)
    asked = request_of(trainer, None, "", 1, None)
    plans = predict_all([asked, as_config(trainer)], ENDS_A_HANG)
    trainer.add_callback(saved)
    trainer.train()
    del trainer
    gc.collect()
    torch.accelerator.reset_peak_memory_stats()
    again = make(tmp_path)
    again.args.max_steps = 4
    again.add_callback(resumed)
    again.train(resume_from_checkpoint=True)

    for plan in plans:
        assert isinstance(plan, MemoryPlan), plan
        peaks = {name: plan.moments[name].allocated_bytes for name in ("save", "resume")}
        assert peaks["save"] == pytest.approx(saved.found["save"] - held, rel=0.01)
        assert peaks["resume"] == pytest.approx(resumed.found["resume"] - held, rel=0.01)
