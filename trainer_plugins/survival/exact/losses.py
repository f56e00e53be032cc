"""Losses: which of them are sums over examples, by the class that computes them.

Gradients of pieces add up to that of the whole only if the loss couples no example with another. No
measurement proves that (KTO's is additive at step 0, DPO's `aot` nearly is). So what is allowed is
listed here, with the weights that come into question, and measured before it is used
(`certificate.py`). What is not listed is refused.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from trainer_plugins.hf_trainer import HfTrainer
from trainer_plugins.survival.exact.delegated import whose_loss
from trainer_plugins.survival.exact.layouts import (
    ANSWERS,
    Completions,
    Inputs,
    Packed,
    Pairs,
    Rows,
)
from trainer_plugins.survival.exact.modules import rope_boundary
from trainer_plugins.survival.exact.own_loss import what_replaces_the_loss
from trainer_plugins.survival.exact.shares import (
    ANSWERED_ROWS,
    ATTENDED_TOKENS,
    COMPLETION_TOKENS,
    LABELLED_ROWS,
    NEXT_TOKENS,
    ROWS,
    SUM,
    TOKENS,
    TOKENS_IN_SIGHT,
    Weight,
)
from trainer_plugins.wrapped import base_model


@dataclass(frozen=True, slots=True)
class Family:
    """Holds what losses of one make have in common."""

    layouts: tuple[Rows | Packed, ...]
    """How examples may lie, asked in order."""

    weights: tuple[Weight, ...]
    """The weights that come into question; a measurement decides between them."""

    share: Weight
    """The weight by which metrics that a trainer logs are averaged over pieces."""

    is_vouched: bool = False
    """Whether the user says that the loss is one of these kinds."""

    delegated_to: type | None = None
    """The class whose `compute_loss` the user's has to call, and no more, in each pass."""

    def for_inputs(self, inputs: Inputs) -> "Family":
        """Leave out the weights that count labels if the inputs have none."""
        if torch.is_tensor(inputs.get("labels")):
            return self
        return replace(
            self,
            weights=tuple(w for w in self.weights if w in (SUM, ROWS, ANSWERED_ROWS))
            or self.weights,
        )


VOUCH = (
    " (vouch_for_loss=True says that it is a sum or a mean over examples, and it is measured then)"
)


class Unknown(str):
    """Says why it is not known whether a loss is a sum over examples.

    A user may vouch for it, and it is measured then.
    """


# Llama shifts its labels, XLM does not.
_CAUSAL = Family((Packed(), Rows()), (SUM, NEXT_TOKENS, TOKENS), NEXT_TOKENS)
_ALIGNED = Family((Rows(),), (SUM, TOKENS), TOKENS)
_TAGS = Family((Rows(),), (SUM, TOKENS, TOKENS_IN_SIGHT), TOKENS)
_CLASSES = Family((Rows(),), (LABELLED_ROWS, ROWS, SUM), ROWS)
_ANSWERS = Family((Rows(),), (ANSWERED_ROWS, ROWS), ROWS)
_ROWS = Family((Rows(),), (ROWS,), ROWS)
_PAIRS = Family((Pairs(),), (ROWS,), ROWS)
_VOUCHED = Family(
    (Packed(), Rows()), (SUM, NEXT_TOKENS, TOKENS, LABELLED_ROWS, ROWS), ROWS, is_vouched=True
)

# By `model.loss_type`, which transformers derives from the class of a model: see LOSS_MAPPING
# there.
_BY_MODEL = {
    "ForCausalLM": _CAUSAL,
    "ForConditionalGeneration": _CAUSAL,
    "ForMaskedLM": _ALIGNED,
    "ForTokenClassification": _TAGS,
    "ForSequenceClassification": _CLASSES,
    "ForImageClassification": _CLASSES,
    "ForVideoClassification": _CLASSES,
    "ForAudioClassification": _CLASSES,
}

_DPO = (
    *("sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "sppo_hard"),
    *("apo_zero", "apo_down", "discopop"),
)

_GRPO = {
    **dict.fromkeys(("grpo", "dr_grpo", "sapo", "luspo"), ROWS),
    **dict.fromkeys(("dapo", "cispo", "vespo"), SUM),
    "bnpo": COMPLETION_TOKENS,
}

_NOT_ADDITIVE = {
    "KTOTrainer": "its KL baseline is a mean over the micro-batch",
    "BCOTrainer": "its reward baseline is a mean over the micro-batch",
    "SentenceTransformerTrainer": "its losses compare each example with the others of the "
    "micro-batch",
}

_COUPLED_MODELS = {
    "PaliGemmaForConditionalGeneration": "a row without padding is computed otherwise when no row "
    "beside it is padded",
}


def bare_model(model: nn.Module) -> Any:
    """Return the model inside PEFT's wrapper, or the model itself."""
    return base_model(model)


def family_of(
    trainer: HfTrainer, compute_loss: Callable[..., Any] | None = None, *, is_vouched: bool = False
) -> Family | str:
    """Find the family of a Trainer's loss.

    Args:
        trainer: the Trainer.
        compute_loss: the Trainer's own, if it is replaced by now.
        is_vouched: whether the user says that the loss is a sum or a mean over examples, if that is
            not known.

    Returns:
        The family, or why it has none.
    """
    compute_loss = compute_loss or trainer.compute_loss
    found = _family_of(trainer, compute_loss)
    if isinstance(found, Unknown) and not is_vouched:
        found = _family_behind(trainer, compute_loss) or found
    family = _VOUCHED if is_vouched and isinstance(found, Unknown) else found
    if isinstance(found, Family) and NEXT_TOKENS in found.weights and _is_regularized(trainer):
        return (
            "AdaLoRA adds a term to the loss of each forward pass (orth_reg_weight), which does "
            "not depend on rows: pieces of a sum over tokens would add it once each. Set "
            "orth_reg_weight=0, or take LoRA"
        )
    boundary = rope_boundary(trainer.model)
    if isinstance(family, str) or boundary is None:
        return family
    return replace(family, layouts=tuple(type(layout)(boundary) for layout in family.layouts))


def _is_regularized(trainer: HfTrainer) -> bool:
    """Tell whether adapters add a term to a loss that is a sum over the window.

    It is peft/tuners/adalora/model.py, AdaLoraModel.forward.
    """
    tuner = getattr(trainer.model, "base_model", None)
    configs = getattr(tuner, "peft_config", None)
    adapter = getattr(tuner, "trainable_adapter_name", None)
    weight = getattr(configs[adapter], "orth_reg_weight", 0) if configs and adapter else 0
    return bool(weight) and bool(trainer.model_accepts_loss_kwargs)


def _family_behind(trainer: HfTrainer, compute_loss: Callable[..., Any]) -> Family | str | None:
    """Find the family of the library's loss that a user's `compute_loss` may hand on, if any."""
    known = whose_loss(trainer, compute_loss)
    if known is None or callable(trainer.compute_loss_func):
        return None
    family = _family_of_class(trainer, known)
    return replace(family, delegated_to=known) if isinstance(family, Family) else family


def _family_of(trainer: HfTrainer, compute_loss: Callable[..., Any]) -> Family | str:
    # TRL's trainers have a second method by that name, which is the one to override.
    owner = next(
        c for c in type(trainer).__mro__ if vars(c).keys() & {"compute_loss", "_compute_loss"}
    )
    library = owner.__module__.partition(".")[0]
    if reason := next(
        (
            r
            for c, r in _NOT_ADDITIVE.items()
            if any(c == k.__name__ for k in type(trainer).__mro__)
        ),
        None,
    ):
        return f"the loss of {type(trainer).__name__} cannot be divided: {reason}"
    if callable(trainer.compute_loss_func):  # trl's GRPO passes a string as a marker
        return Unknown(
            "compute_loss_func is a loss of your own, and whether it can be divided is not known"
        )
    here = getattr(compute_loss, "__module__", "").partition(".")[0]
    if library in ("transformers", "trl") and here != library:
        return (
            "trainer.compute_loss was replaced already: by survive_oom, which detaches, or by you"
        )
    return _family_of_class(trainer, owner)


def _family_of_class(trainer: HfTrainer, owner: type) -> Family | str:
    name, library = owner.__name__, owner.__module__.partition(".")[0]
    if (library, name) == ("transformers", "Trainer"):
        return _family_of_model(trainer)
    if (library, name) == ("trl", "SFTTrainer"):
        if replaced := what_replaces_the_loss(trainer.model):
            return Unknown(f"{replaced}, and whether that loss can be divided is not known")
        # trl before 1.3 averages its entropy over prompts too; with Liger there is no entropy, but
        # an accuracy over labels.
        return _CAUSAL if trainer.args.use_liger_kernel else replace(_CAUSAL, share=ATTENDED_TOKENS)
    if (library, name) == ("trl", "RewardTrainer"):
        return _PAIRS
    if (library, name) == ("trl", "DPOTrainer"):
        return _family_of_dpo(trainer)
    if (library, name) == ("trl", "GRPOTrainer"):
        return _family_of_grpo(trainer)
    if (library, name) == ("trl", "RLOOTrainer"):
        return _completions(ROWS)
    return Unknown(f"{name}.compute_loss is not known to be a sum over examples")


def _family_of_model(trainer: HfTrainer) -> Family | str:
    model = bare_model(trainer.model)
    kind, loss = type(model).__name__, getattr(model, "loss_type", None)
    if kind in _COUPLED_MODELS:
        return f"{kind} cannot be divided: {_COUPLED_MODELS[kind]}"
    if "return_loss" in inspect.signature(model.forward).parameters:
        return f"the loss of {kind} compares each example with the others of the micro-batch"
    owner = next(c for c in type(model).__mro__ if "forward" in vars(c))
    if not owner.__module__.startswith("transformers."):
        return Unknown(
            f"{owner.__name__}.forward is not that of transformers, and whether its loss can be "
            "divided is not known"
        )
    if "_loss_function" in vars(model):
        return Unknown(
            f"the loss_function of {kind} was replaced, and whether it can be divided is not known"
        )
    if replaced := what_replaces_the_loss(trainer.model):
        return Unknown(f"{replaced}, and whether that loss can be divided is not known")
    if loss == "ForConditionalGeneration" and model.config.is_encoder_decoder:
        return _ALIGNED
    # Others of that name have labels instead, or search beams with a loss for each.
    names = inspect.signature(model.forward).parameters.keys()
    if loss == "ForQuestionAnswering" and {*ANSWERS} <= names and "cls_index" not in names:
        return _ANSWERS
    if loss is None and kind.endswith("LMHeadModel"):
        return _CAUSAL
    unknown = Unknown(
        f"the loss of {kind} (loss_type={loss!r}) is not known to be a sum over examples"
    )
    return _BY_MODEL.get(loss or "", unknown)


def _family_of_dpo(trainer: Any) -> Family | str:
    kinds = (
        trainer.args.loss_type
        if isinstance(trainer.args.loss_type, list)
        else [trainer.args.loss_type]
    )
    if unknown := [kind for kind in kinds if kind not in _DPO]:
        return (
            f"the DPO loss {unknown[0]!r} is not a mean over pairs: it sorts, averages tokens or "
            "keeps a running mean"
        )
    if getattr(trainer.args, "rpo_alpha", None) is not None:
        return "rpo_alpha adds a mean over tokens to a mean over pairs, and no one weight fits both"
    if getattr(trainer, "padding_free", False):
        return "DPO with padding_free is not supported yet"
    # trl before 1.0 has own names for chosen and rejected, with one row a pair.
    return _ROWS if hasattr(trainer, "concatenated_inputs") else _PAIRS


def _family_of_grpo(trainer: Any) -> Family | str:
    kind = trainer.loss_type
    if kind not in _GRPO:
        return f"the GRPO loss {kind!r} is not known to be a sum over completions"
    if trainer.top_entropy_quantile < 1.0:
        return (
            "top_entropy_quantile compares the tokens of all completions of a micro-batch with "
            "each other"
        )
    if getattr(trainer, "_entropy_bonus_enabled", False):
        return (
            "entropy_coef and use_adaptive_entropy add a mean over tokens that is not weighted by "
            "completions"
        )
    if getattr(trainer, "use_liger_loss", False):
        return (
            "GRPO with use_liger_loss is not supported: whether its kernel's loss can be divided "
            "is not known"
        )
    return _completions(_GRPO[kind])


def _completions(weight: Weight) -> Family:
    return Family((Completions(),), (weight,), COMPLETION_TOKENS)
