"""Predict a run, then really run it on the simulated card, and compare.

No figure here is written by hand.
"""

import pytest
import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
)

from tests.planner.loop import Loop
from trainer_plugins import MemoryPlan, plan_run
from trainer_plugins.units import GIB

VOCABULARY = 2000


def llama(dtype=torch.float32, **config) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 128,
        "intermediate_size": 352,
        "num_hidden_layers": 4,
        "vocab_size": VOCABULARY,
    }
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **heads, "pad_token_id": 0, **config})).to(
        dtype
    )


def with_lora(model):
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(
        model, peft.LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    )


def gpt2() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, n_embd=128, n_layer=3, n_head=4, n_positions=256)
    )


def bert() -> BertForMaskedLM:
    sizes = {
        "hidden_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "intermediate_size": 256,
    }
    return BertForMaskedLM(BertConfig(vocab_size=VOCABULARY, **sizes))


def t5() -> T5ForConditionalGeneration:
    sizes = {"d_model": 128, "d_kv": 32, "d_ff": 256, "num_layers": 2, "num_heads": 4}
    return T5ForConditionalGeneration(
        T5Config(vocab_size=VOCABULARY, decoder_start_token_id=0, pad_token_id=0, **sizes)
    )


def rows(count=32, length=128, padded=False) -> list[dict[str, torch.Tensor]]:
    tokens = torch.randint(
        1, VOCABULARY, (count, length), generator=torch.Generator().manual_seed(0)
    )
    made = [{"input_ids": row, "labels": row} for row in tokens]
    if padded:
        for index, row in enumerate(made):
            row["attention_mask"] = (torch.arange(length) < length - index).long()
    return made


class TwiceTheLoss(Trainer):
    """Somebody's own Trainer, with a loss of its own that needs memory."""

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        outputs = model(**{name: value for name, value in inputs.items() if name != "labels"})
        losses = torch.nn.functional.cross_entropy(
            outputs.logits.float().flatten(0, 1), inputs["labels"].flatten(), reduction="none"
        )
        return (losses.mean(), outputs) if return_outputs else losses.mean()


def run(
    tmp_path,
    model,
    trainer_class=Trainer,
    data=None,
    evaluation=None,
    metrics=None,
    callbacks=None,
    **arguments,
):
    args_class = Seq2SeqTrainingArguments if trainer_class is Seq2SeqTrainer else TrainingArguments
    settings = {
        "output_dir": str(tmp_path),
        "max_steps": 3,
        "per_device_train_batch_size": 8,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "logging_strategy": "no",
        **arguments,
    }
    return trainer_class(
        model=model,
        args=args_class(**settings),
        train_dataset=data if data is not None else rows(),
        eval_dataset=evaluation,
        compute_metrics=metrics,
        callbacks=callbacks,
    )


def no_metrics(predictions) -> dict[str, float]:
    return {}


EVALUATES = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 4}
GENERATES = {"predict_with_generate": True, "generation_max_length": 48, "generation_num_beams": 1}
RUNS = {
    "fp32": lambda path: run(path, llama()),
    "checkpointing": lambda path: run(path, llama(), gradient_checkpointing=True),
    "reentrant": lambda path: run(
        path,
        llama(),
        data=rows(length=448),
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": True},
    ),
    "lora": lambda path: run(path, with_lora(llama())),
    "lora, checkpointing": lambda path: run(
        path,
        with_lora(llama()),
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False},
    ),
    "accumulation": lambda path: run(
        path, llama(), data=rows(96), per_device_train_batch_size=4, gradient_accumulation_steps=6
    ),
    "bf16 autocast": lambda path: run(path, llama(), bf16=True),
    "bf16 weights": lambda path: run(path, llama(torch.bfloat16)),
    "sgd": lambda path: run(path, llama(), optim="sgd"),
    "adafactor": lambda path: run(path, llama(), optim="adafactor"),
    "foreach": lambda path: run(
        path, llama(hidden_size=256), optim="adamw_torch", data=rows(length=32)
    ),
    "fused": lambda path: run(
        path, llama(hidden_size=256), optim="adamw_torch_fused", data=rows(length=32)
    ),
    "padded": lambda path: run(path, llama(), data=rows(padded=True)),
    "frozen": lambda path: run(path, frozen(llama())),
    "evaluation": lambda path: run(path, llama(), evaluation=rows(20), **EVALUATES),
    "evaluation keeps logits": lambda path: run(
        path, llama(), evaluation=rows(60), metrics=no_metrics, **EVALUATES
    ),
    "evaluation moves logits": lambda path: run(
        path,
        llama(),
        evaluation=rows(60),
        metrics=no_metrics,
        eval_accumulation_steps=2,
        **EVALUATES,
    ),
    "t5": lambda path: run(path, t5()),
    "t5 generates": lambda path: run(
        path,
        t5(),
        Seq2SeqTrainer,
        evaluation=rows(16),
        metrics=no_metrics,
        **EVALUATES,
        **GENERATES,
    ),
    "gpt2": lambda path: run(path, gpt2()),
    "bert": lambda path: run(path, bert(), data=rows(length=384, padded=True)),
    "own trainer": lambda path: run(path, llama(), TwiceTheLoss),
}


def frozen(model):
    model.model.embed_tokens.requires_grad_(False)
    for layer in model.model.layers[:2]:
        layer.requires_grad_(False)
    return model


@pytest.fixture
def large_card(simgpu):
    simgpu.set_capacity(4 * GIB)
    return simgpu


LOOP = Loop(RUNS)


@pytest.mark.all(
    unless=lambda name: (
        name in ("checkpointing", "lora", "bf16 autocast", "padded", "evaluation keeps logits")
    )
)
@pytest.mark.parametrize("name", RUNS)
def test_the_card_holds_what_was_predicted(simgpu, tmp_path, name):
    plan = LOOP.goes_round(name, tmp_path)
    assert plan.device == "simgpu"
    assert plan.fits is True
    assert plan.nvidia_smi_peak_bytes == plan.reserved_peak_bytes  # this card has no context


def test_a_plan_leaves_the_trainer_as_it_was(large_card, tmp_path):
    trainer, twin = (run(tmp_path, llama(), data=rows(64)) for _ in range(2))
    state, allocated = torch.get_rng_state(), torch.accelerator.memory_allocated()
    attributes = {name: id(value) for name, value in vars(trainer).items()}

    plan = plan_run(trainer)

    assert plan.num_parameters == sum(parameter.numel() for parameter in trainer.model.parameters())
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.accelerator.memory_allocated() == allocated
    assert {name: id(value) for name, value in vars(trainer).items()} == attributes
    assert trainer.optimizer is None
    assert trainer.train().training_loss == twin.train().training_loss
    assert MemoryPlan.from_json(plan.to_json()) == plan
