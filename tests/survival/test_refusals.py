"""What is not exact, or not known to be, is refused by name before training; nothing has been changed then."""

import functools
import re

import pytest
import torch
from peft import AdaLoraConfig, get_peft_model
from torch import nn
from transformers import (
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    NllbMoeConfig,
    NllbMoeForConditionalGeneration,
    Trainer,
)

from tests.events import at
from tests.models import IS_OLD, checkpointing, tiny_llama
from tests.survival.failing import (
    Run,
    gradients_off_by,
    padded,
    refuse,
    small_trainer,
    survive,
)
from tests.written import read_entries, read_findings
from trainer_plugins import survive_oom
from trainer_plugins.record.timeline import Remark


class OwnLoss(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return model(**inputs).loss ** 2


class OwnStep(Trainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = self._forward(model, inputs)
        self.accelerator.backward(loss)
        return loss.detach()

    def _forward(self, model, inputs):
        return model(**self._prepare_inputs(inputs)).loss


class StepInTwo(OwnStep):
    def _forward(self, model, inputs):
        return self.compute_loss(model, self._prepare_inputs(inputs))


class OwnModel(nn.Module):
    def __init__(self, normalization=nn.Identity) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(128, 8), normalization(8), nn.Linear(8, 3)

    def forward(self, input_ids, labels=None, attention_mask=None):
        logits = self.head(self.norm(self.embed(input_ids).mean(1)))
        return {"loss": nn.functional.cross_entropy(logits, labels[:, 0] % 3), "logits": logits}


class Named(OwnModel):
    """Says that it is a classifier of transformers."""

    loss_type = "ForSequenceClassification"


def normalized():
    return OwnModel(nn.BatchNorm1d)


def taking_gradients():
    model = tiny_llama()
    model.model.norm.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    return model


def changing_gradients():
    model = tiny_llama()
    model.model.norm.weight.register_hook(lambda gradient: gradient.clamp(-1, 1))
    return model


def adalora(weight: float = 0.5):
    config = AdaLoraConfig(
        target_modules=["q_proj"], total_step=9, task_type="CAUSAL_LM", orth_reg_weight=weight
    )
    return get_peft_model(tiny_llama().double(), config)


def mixtral():
    sizes = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "num_local_experts": 2}
    return MixtralForCausalLM(MixtralConfig(**sizes, **heads, output_router_logits=True))


class OneTower(LlamaForCausalLM):
    """May compare rows, and no two towers are known whose outputs are compared."""

    def forward(self, *args, return_loss=None, **kwargs):
        return super().forward(*args, **kwargs)


def replaced_loss_function():
    model = tiny_llama()
    model.loss_function = lambda logits, labels, **kwargs: logits.mean()
    return model


class WeightedByClass:
    """A loss that is weighted by classes: of rows of one class it is a mean over rows."""

    def __call__(self, module, args, kwargs, outputs):
        outputs["loss"] = outputs["loss"] * 2
        return outputs


def hooked():
    model = tiny_llama()
    model.register_forward_hook(WeightedByClass(), with_kwargs=True)
    return model


def with_its_own_forward(wraps=False):
    model = tiny_llama()
    forward = model.forward

    def weighted(*args, **kwargs):
        return forward(*args, **kwargs)

    model.forward = functools.wraps(forward)(weighted) if wraps else weighted
    return model


def of_another_type():
    model = tiny_llama().double()
    model.loss_type = "ForMaskedLM"
    return model


def with_module(make):
    def model():
        model = tiny_llama()
        model.model.add = make(model)
        return model

    return model


class GhostNorm(nn.LayerNorm):
    """As others call theirs, without being a subclass of torch's."""


def nllb_moe():
    sizes = {
        "vocab_size": 128,
        "d_model": 32,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "num_experts": 4,
    }
    ffn = {
        "encoder_ffn_dim": 32,
        "decoder_ffn_dim": 32,
        "encoder_sparse_step": 1,
        "decoder_sparse_step": 1,
    }
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    return NllbMoeForConditionalGeneration(NllbMoeConfig(**sizes, **ffn, **heads))


CASES: dict[str, tuple] = {
    "own compute_loss": (
        {"trainer_class": OwnLoss},
        "OwnLoss.compute_loss is not known to be a sum",
    ),
    "compute_loss_func": (
        {"compute_loss_func": lambda *args, **kwargs: 0},
        "compute_loss_func is a custom loss",
    ),
    "own model": (
        {"model": OwnModel},
        "OwnModel.forward is not that of transformers, and it is unknown whether its loss can be split",
    ),
    "own loss_function": (
        {"model": replaced_loss_function},
        "loss_function of LlamaForCausalLM was replaced",
    ),
    "forward hook": (
        {"model": hooked},
        r"a forward hook of LlamaForCausalLM \(tests\.survival\.test_refusals\.WeightedByClass\) may set another loss",
    ),
    "own forward": (
        {"model": with_its_own_forward},
        "the forward of this LlamaForCausalLM was replaced by tests",
    ),
    "wrapped forward": (
        {"model": lambda: with_its_own_forward(wraps=True)},
        "the forward of this LlamaForCausalLM was replaced by tests",
    ),
    "a class that names a loss_type": (
        {"model": Named},
        "OwnModel.forward is not that of transformers",
    ),
    "batch normalization": (
        {"model": normalized},
        r"batch normalization \(`norm`, \w+\) makes every row",
    ),
    "SyncBatchNorm": (
        {"model": with_module(lambda _: nn.SyncBatchNorm(8))},
        r"batch normalization \(`model.add`, SyncBatchNorm\)",
    ),
    "a norm of the batch": (
        {"model": with_module(lambda _: GhostNorm(8))},
        r"batch normalization \(`model.add`, GhostNorm\)",
    ),
    "running statistics": (
        {"model": with_module(lambda _: nn.InstanceNorm1d(8, track_running_stats=True))},
        r"each forward pass moves the running statistics of `model.add` \(InstanceNorm1d\)",
    ),
    "spectral norm": (
        {"model": with_module(lambda _: nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)))},
        r"spectral_norm \(`model.add.parametrizations.weight.0`",
    ),
    "spectral norm of old": (
        {"model": with_module(lambda _: nn.utils.spectral_norm(nn.Linear(8, 8)))},
        r"spectral_norm \(`model.add`, Linear\)",
    ),
    "capacity": (
        {"model": nllb_moe},
        r"the router `model.encoder.layers.0.ffn.router` \(NllbMoeTop2Router\) has a capacity, which counts the tokens",
    ),
    "dynamic RoPE": (
        {"model": lambda: tiny_llama(rope_scaling={"rope_type": "dynamic", "factor": 2.0})},
        r"dynamic RoPE \(`model.rotary_emb`, LlamaRotaryEmbedding\) remembers the longest",
    ),
    "contrastive": (
        {"model": lambda: OneTower(tiny_llama().config)},
        "the loss of OneTower compares each example with the others",
    ),
    "router": ({"model": mixtral}, "router's auxiliary loss is not a sum over rows"),
    "layerwise": (
        {"optim": "galore_adamw_layerwise", "optim_target_modules": "q"},
        "applies gradients inside",
    ),
    "hook takes": ({"model": taking_gradients}, "consumes the gradient of `model.norm.weight`"),
    "hook changes": ({"model": changing_gradients}, "changes the gradient of `model.norm.weight`"),
    "AdaLoRA": (
        {"model": adalora},
        r"AdaLoRA adds a term to the loss of each forward pass \(orth_reg_weight\)",
    ),
    "a training_step of its own": (
        {"trainer_class": OwnStep},
        "OwnStep.training_step never calls compute_loss",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_refused_when_it_is_attached(tmp_path, case: str, caplog) -> None:
    options, why = CASES[case]
    model = options.get("model", tiny_llama)()
    trainer = small_trainer(tmp_path, **{**options, "model": model})
    before = (
        dict(vars(trainer)),
        dict(vars(trainer.accelerator)),
        list(trainer.callback_handler.callbacks),
    )

    with pytest.raises(ValueError, match=why) as raised:
        survive_oom(trainer)
    assert "\n" not in str(raised.value)

    survive_oom(trainer, on_refusal="warn").detach()
    assert (vars(trainer), vars(trainer.accelerator), trainer.callback_handler.callbacks) == before
    (entry,) = read_entries(tmp_path)
    assert isinstance(entry, Remark)
    assert entry.finding.code == "out-of-memory-refused"
    assert entry.finding.summary == "survive_oom does nothing in this run"
    assert re.search(why, entry.finding.evidence)
    assert entry.finding.evidence in caplog.text


@pytest.mark.parametrize(
    "options",
    [
        {"trainer_class": StepInTwo},
        {"model": of_another_type},
        *(() if IS_OLD else [{"model": lambda: adalora(weight=0.0)}]),  # PEFT 0.17 wants a term
    ],
    ids=lambda options: next(iter(options)),
)
def test_what_is_like_them_and_adds_up_is_divided(tmp_path, options) -> None:
    def make():
        model = options.get("model", lambda: tiny_llama().double())()
        settings = {"steps": 1, "gradient_accumulation_steps": 1}
        return small_trainer(tmp_path, **{**settings, **options, "model": model})

    whole, survived = survive(make, {0: 0.8}, ladder=())
    assert gradients_off_by(survived, whole) <= 1e-12


@pytest.mark.parametrize(
    ("where", "name", "value", "why"),
    [
        ("args", "_n_gpu", 2, "nn.DataParallel over 2 cards is not supported"),
        ("", "is_model_parallel", True, "a model spread over several cards is not supported yet"),
        ("model", "_tp_size", 2, "tensor, context and sequence parallelism are not supported"),
    ],
)
def test_one_process_with_several_cards_is_refused(
    tmp_path, where: str, name: str, value, why: str
) -> None:
    trainer = small_trainer(tmp_path)
    setattr(getattr(trainer, where) if where else trainer, name, value)

    with pytest.raises(ValueError, match=why):
        survive_oom(trainer)


def test_a_model_that_exchanges_its_parameters_in_training_is_not_resumed(tmp_path) -> None:
    trainer = small_trainer(tmp_path)
    head = trainer.model.lm_head

    def exchange(_) -> None:
        head.weight = torch.nn.Parameter(head.weight.detach().clone())

    trainer.add_callback(at("step_end", exchange))
    refuse(trainer, "the model's parameters have changed since training began", {2: [250]})


@pytest.mark.parametrize("on_refusal", ["error", "warn"])
def test_what_comes_with_the_optimizer_is_seen_before_the_first_step(
    tmp_path, on_refusal: str
) -> None:
    class InBackward(Trainer):
        def create_optimizer(self, *args):
            self.model.lm_head.weight.register_post_accumulate_grad_hook(lambda parameter: None)
            return super().create_optimizer(*args)

    trainer = small_trainer(tmp_path, trainer_class=InBackward)
    words = {
        "error": "consumes the gradient of `lm_head.weight`",
        "warn": r"^CUDA out of memory.* for number 100\.$",
    }
    errors = (ValueError, torch.OutOfMemoryError)
    refuse(trainer, words[on_refusal], {0: [100]}, errors, on_refusal=on_refusal)
    assert trainer.state.global_step == 0


def test_a_hook_that_a_later_callback_sets_is_seen_before_the_first_step(tmp_path) -> None:
    """The run is judged when its step begins; the callbacks behind ours have not begun it then."""

    def hook(now) -> None:
        now.model.lm_head.weight.register_post_accumulate_grad_hook(lambda parameter: None)

    trainer = small_trainer(tmp_path)
    survive_oom(trainer)
    trainer.add_callback(at("step_begin", hook))
    with pytest.raises(ValueError, match=r"consumes the gradient of `lm_head\.weight`"):
        Run(trainer)
    assert trainer.state.global_step == 0


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"min_micro_batch": 0}, "min_micro_batch is a number from 1 on, got 0"),
        (
            {"ladder": ("sharding",)},
            r"ladder is a tuple of names from \('checkpointing', 'offload', 'stream'\), got \('sharding',\)",
        ),
        ({"on_refusal": "ignore"}, "on_refusal is 'error' or 'warn', got 'ignore'"),
    ],
)
def test_bad_arguments(tmp_path, wrong, why: str) -> None:
    trainer = small_trainer(tmp_path)
    with pytest.raises(ValueError, match=why):
        survive_oom(trainer, **wrong)
    assert "compute_loss" not in vars(trainer)


BATCHES = {
    "rows disagree": (lambda batch: {**batch, "pixel_values": torch.zeros(1, 3, 8, 8)},
                      "`pixel_values` has 1 rows where the others have 4"),
    "no tensor": (lambda batch: {**batch, "pixel_values": {"left": 1}}, "it holds a dict, which cannot be divided"),
}  # fmt: skip


@pytest.mark.parametrize("case", BATCHES)
def test_a_batch_that_cannot_be_divided_is_refused_at_the_first(tmp_path, case: str) -> None:
    change, why = BATCHES[case]
    trainer = small_trainer(tmp_path, data_collator=lambda rows: change(padded(rows)))
    refuse(trainer, why, error=ValueError)
    assert trainer.state.global_step == 0


def without_pictures(_, args, kwargs):
    return args, {name: value for name, value in kwargs.items() if name != "pixel_values"}


def test_it_can_be_told_to_train_on_and_then_checkpointing_still_helps(tmp_path) -> None:
    def make():
        change, _ = BATCHES["rows disagree"]
        model = tiny_llama().double()
        model.register_forward_pre_hook(without_pictures, with_kwargs=True)
        return small_trainer(tmp_path, model, data_collator=lambda rows: change(padded(rows)))

    num = Run(make()).num_allocations[0]
    trainer = make()
    survive_oom(trainer, on_refusal="warn")
    Run(trainer, {0: [num // 2]})

    codes = [finding.code for finding in read_findings(tmp_path)]
    assert codes == ["out-of-memory-refused", "out-of-memory-survived"]
    assert trainer.model.is_gradient_checkpointing


def test_weights_used_twice_under_reentrant_checkpointing(tmp_path) -> None:
    def make(reentrant: bool):
        model = tiny_llama().double()
        model.model.layers[1].self_attn.q_proj = model.model.layers[0].self_attn.q_proj
        return small_trainer(tmp_path, model, **checkpointing(reentrant=reentrant))

    for reentrant, where in ((False, 300), (True, 100)):
        trainer = make(reentrant)
        survive_oom(trainer)
        Run(trainer, {0: [where]})
    why = "is used more than once under reentrant checkpointing"
    refuse(make(reentrant=True), why, {0: [300]})
