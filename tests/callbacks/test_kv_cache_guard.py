"""Inside training `generate` returns wrong text without a word; with the guard it is right, and nothing is changed."""

import copy
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import (
    BertConfig,
    EncoderDecoderConfig,
    EncoderDecoderModel,
    GenerationConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from tests.events import at
from tests.models import tiny_llama
from tests.survival.classes.batches import batch_for
from tests.survival.classes.tiny import tiny_model
from trainer_plugins import (
    EvalGenerateCleanup,
    KVCacheGuard,
    MemoryWatchdog,
    generation_memory,
    protect,
)

PROMPT = [[5, 17, 99, 3]]
# From 5.24 on, transformers checkpoints no layer that computes without gradients.
CHECKPOINTS_GENERATION = Version(transformers.__version__) < Version("5.24")


def text(model, **kwargs) -> list[int]:
    prompt = torch.tensor(PROMPT, device=model.device)
    return model.generate(prompt, max_new_tokens=24, do_sample=False, **kwargs)[0].tolist()


class Preview(TrainerCallback):
    """Generates in the middle of training, as people do, and beside it what is right: a copy in eval mode."""

    def __init__(self) -> None:
        self.pairs: list[tuple[list[int], list[int]]] = []

    def on_step_end(self, args, state, control, **kwargs):
        model = kwargs["model"]
        assert model.training
        assert model.is_gradient_checkpointing
        right = copy.deepcopy(model).eval()
        self.pairs.append((text(model), text(right)))
        assert model.training
        assert model.is_gradient_checkpointing


@pytest.mark.parametrize("callbacks", [[], [KVCacheGuard]], ids=["without", "with"])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.all(but=2)
def test_text_generated_inside_training(make_trainer, anywhere, callbacks, dropout: float) -> None:
    preview = Preview()
    model = tiny_llama(attention_dropout=dropout)

    make_trainer(
        preview,
        *[c() for c in callbacks],
        model=model,
        gradient_checkpointing=True,
        max_steps=4,
        learning_rate=0.01,
    ).train()

    assert len(preview.pairs) == 4
    is_right = bool(callbacks) or not (dropout or CHECKPOINTS_GENERATION)
    assert all(inside == right for inside, right in preview.pairs) == is_right


class Asking(LlamaForCausalLM):
    """Remembers what each training forward was told about the cache; its forward would build one."""

    def forward(self, input_ids=None, labels=None, use_cache=True, **kwargs):
        self.asked = [*getattr(self, "asked", []), (self.training, use_cache)]
        return super().forward(input_ids=input_ids, labels=labels, use_cache=use_cache, **kwargs)


@pytest.mark.parametrize("checkpointing", [True, False])
def test_no_checkpointed_forward_builds_a_cache(make_trainer, checkpointing: bool) -> None:
    model = Asking(tiny_llama().config)

    make_trainer(
        KVCacheGuard(),
        model=model,
        gradient_checkpointing=checkpointing,
        eval_strategy="steps",
        eval_steps=4,
    ).train()

    assert {use_cache for training, use_cache in model.asked if training} == {not checkpointing}
    assert {use_cache for training, use_cache in model.asked if not training} == {
        True
    }  # evaluation is left alone


class Failing(TrainerCallback):
    def __init__(self, error) -> None:
        self.error = error

    def on_step_end(self, args, state, control, **kwargs):
        self.inside = text(kwargs["model"])
        raise self.error("training raises")


def frozen_state(model) -> dict[str, object]:
    return {
        "use_cache": model.config.use_cache,
        "generation_use_cache": model.generation_config.use_cache,
        "modes": [module.training for module in model.modules()],
        "checkpointing": [
            getattr(module, "gradient_checkpointing", None) for module in model.modules()
        ],
    }


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_everything_is_as_it_was_also_when_training_raises(make_trainer, error) -> None:
    model = tiny_llama(attention_dropout=0.5)
    failing = Failing(error)
    guards = (KVCacheGuard(), MemoryWatchdog(), EvalGenerateCleanup())
    trainer = make_trainer(failing, *guards, model=model, gradient_checkpointing=True)
    with pytest.raises(error, match="training raises"):
        trainer.train()

    assert "generate" not in vars(model)
    assert not model._forward_pre_hooks
    before = frozen_state(model)
    unguarded = text(model)  # train mode, with dropout: as wrong as it always was without the guard
    assert frozen_state(model) == before
    assert model.training
    assert unguarded != failing.inside == text(copy.deepcopy(model).eval())


def test_a_forward_of_your_own_without_gradients_keeps_its_cache(make_trainer) -> None:
    model = Asking(tiny_llama().config)

    @torch.no_grad()
    def decode(now) -> None:
        model.asked = []
        model(input_ids=torch.tensor(PROMPT, device=now.args.device))

    callbacks = (at("step_end", decode), KVCacheGuard())
    make_trainer(*callbacks, model=model, gradient_checkpointing=True, max_steps=1).train()

    assert model.asked == [(True, True)]


def test_a_generate_that_raises_restores_too(make_trainer) -> None:
    states = []

    def generate(now) -> None:
        now.model.model.layers[0].eval()  # as one freezes a layer's dropout
        states.append(frozen_state(now.model))
        with pytest.raises(ValueError, match="not used by the model"):
            text(now.model, no_such_argument=1)
        states.append(frozen_state(now.model))

    callbacks = (at("step_end", generate), KVCacheGuard())
    make_trainer(*callbacks, gradient_checkpointing=True, max_steps=1).train()

    before, after = states
    assert after == before


WITHOUT_CACHE = GenerationConfig(
    use_cache=False, max_new_tokens=4, eos_token_id=127, pad_token_id=0
)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ((), {"use_cache": False, "max_new_tokens": 24}),
        ((), {"generation_config": WITHOUT_CACHE}),
        ((WITHOUT_CACHE,), {}),
    ],
    ids=["argument", "config", "config by place"],
)
def test_the_callers_word_on_the_cache_counts(make_trainer, given, named) -> None:
    model = Asking(tiny_llama().config)

    def generate(now) -> None:
        model.asked = []
        model.generate(torch.tensor(PROMPT, device=now.args.device), *given, **named)

    make_trainer(at("step_end", generate), KVCacheGuard(), model=model, max_steps=1).train()

    assert {use_cache for _, use_cache in model.asked} == {False}


def test_ones_own_preview_code() -> None:
    model = tiny_llama().train()
    model.gradient_checkpointing_enable() if not hasattr(
        model, "activation_checkpointing_enable"
    ) else model.activation_checkpointing_enable()
    right = text(copy.deepcopy(model).eval())
    before = frozen_state(model)

    with generation_memory(model):
        inside = text(model)

    assert inside == right
    assert frozen_state(model) == before
    with pytest.raises(ZeroDivisionError), generation_memory(model):
        raise ZeroDivisionError
    assert frozen_state(model) == before


def test_a_generate_of_the_models_own_gets_what_it_was_given(make_trainer) -> None:
    class Own(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1))
            self.generated: list[tuple] = []

        def forward(self, input_ids=None, labels=None):
            return {"loss": (self.weight * input_ids.float()).mean()}

        def generate(self, prompt, temperature=1.0):
            self.generated.append((prompt, temperature, self.training))

    model = Own()
    previews = at("step_end", lambda now: now.model.generate("once", temperature=0.5))
    make_trainer(previews, KVCacheGuard(), model=model, max_steps=1).train()

    assert model.generated == [("once", 0.5, False)]
    assert "generate" not in vars(model)


def test_a_wrapper_put_over_ours_stays(make_trainer) -> None:
    model = tiny_llama()
    wraps = at("step_end", lambda now: vars(now.model).update(generate=print))
    make_trainer(KVCacheGuard(), wraps, model=model, max_steps=1).train()

    assert vars(model)["generate"] is print


def encoder_decoder_pair() -> EncoderDecoderModel:
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 32}
    half = BertConfig(vocab_size=128, num_hidden_layers=2, **sizes)
    config = EncoderDecoderConfig.from_encoder_decoder_configs(half, half)
    config.decoder_start_token_id, config.pad_token_id = 1, 0
    torch.manual_seed(0)
    return EncoderDecoderModel(config)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", ["T5", "MT5", "Bart", "MBart", "Whisper", "Llava", "a pair"])
@pytest.mark.all(but=4)
def test_the_presets_leave_every_number_as_it_was(
    tmp_path, monkeypatch, name: str, checkpointing: bool
) -> None:
    """Where a decoder has a config of its own, plain training builds a cache, and rounds by it."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    torch.manual_seed(0)
    made: Any
    if name == "a pair":
        made = encoder_decoder_pair()
    else:
        made = tiny_model(getattr(transformers, f"{name}ForConditionalGeneration")).float()
        made.set_attn_implementation("eager")
    batch = batch_for(made, labels_at_padding=False)
    if "input_ids" in batch:
        batch = {"input_ids": torch.randint(3, 60, (4, 40))}
    batch["labels"] = torch.randint(3, 60, (4, 40))
    rows = [
        {k: v[i].float() if v.is_floating_point() else v[i] for k, v in batch.items()}
        for i in range(4)
    ]
    weights = []
    for preset in (None, "memory_safe", "survive"):
        model = copy.deepcopy(made)
        settings = {"max_steps": 3, "report_to": "none", "save_strategy": "no"}
        settings |= {"gradient_checkpointing": checkpointing, "disable_tqdm": True}
        args = TrainingArguments(str(tmp_path), per_device_train_batch_size=4, **settings)
        trainer = Trainer(model, args, train_dataset=rows)
        if preset:
            protect(trainer, preset)
        trainer.train()
        weights.append(model.state_dict())

    plain, *guarded = weights
    assert any(not torch.equal(value, made.state_dict()[key]) for key, value in plain.items())
    for other in guarded:
        assert all(torch.equal(value, other[key]) for key, value in plain.items())
