"""Losses: which of them are sums over examples, by the class that computes them.

No measurement proves that no examples are coupled (KTO's loss is additive at step 0), so what is
allowed is listed, and measured before it is used (`certificate.py`). What is not listed is refused.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from trainer_plugins.hf_trainer import HfTrainer
from trainer_plugins.survival.exact import shares
from trainer_plugins.survival.exact.layouts import Completions, Layout, Packed, Pairs, Rows
from trainer_plugins.survival.exact.modules import rope_boundary
from trainer_plugins.survival.exact.own_loss import what_replaces_the_loss, whose_loss
from trainer_plugins.wrapped import base_model


@dataclass(frozen=True, slots=True)
class Family:
    """Holds what losses of one kind have in common."""

    layouts: tuple[Layout, ...]  # how examples may lie, asked in order
    weights: tuple[shares.Weight, ...]  # those in question; a measurement decides between them
    share: shares.Weight  # the weight for averages over pieces of the metrics that a trainer logs
    is_vouched: bool = False  # whether the user says that the loss is one of these kinds
    delegated_to: type | None = None  # whose `compute_loss` the user's must call, and no more


VOUCH = " (vouch_for_loss=True says that it is a sum or a mean over examples; it is measured then)"


@dataclass(frozen=True, slots=True)
class NoFamily:
    """Says why a loss belongs to no family."""

    why: str
    can_vouch: bool = False  # whether it may be a sum: if a user vouches, it is measured

    @property
    def words(self) -> str:
        return self.why + VOUCH if self.can_vouch else self.why


def _unknown(why: str) -> NoFamily:
    return NoFamily(why, can_vouch=True)


# Llama shifts its labels, XLM does not.
_CAUSAL = Family(
    (Packed(), Rows()), (shares.SUM, shares.NEXT_TOKENS, shares.TOKENS), shares.NEXT_TOKENS
)
_ALIGNED = Family((Rows(),), (shares.SUM, shares.TOKENS), shares.TOKENS)
_TAGS = Family((Rows(),), (shares.SUM, shares.TOKENS, shares.TOKENS_IN_SIGHT), shares.TOKENS)
_CLASSES = Family((Rows(),), (shares.LABELLED_ROWS, shares.ROWS, shares.SUM), shares.ROWS)
_ANSWERS = Family((Rows(),), (shares.ANSWERED_ROWS, shares.ROWS), shares.ROWS)
_ROWS = Family((Rows(),), (shares.ROWS,), shares.ROWS)
_COMPLETIONS = Family((Completions(),), (shares.ROWS,), shares.COMPLETION_TOKENS)
_PAIRS = Family((Pairs(),), (shares.ROWS,), shares.ROWS)
_VOUCHED = Family(
    (Packed(), Rows()),
    (shares.SUM, shares.NEXT_TOKENS, shares.TOKENS, shares.LABELLED_ROWS, shares.ROWS),
    shares.ROWS,
    is_vouched=True,
)

# By `model.loss_type`, which transformers derives from a model's class (LOSS_MAPPING).
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
    "sigmoid",
    "sigmoid_norm",
    "hinge",
    "ipo",
    "exo_pair",
    "nca_pair",
    "robust",
    "sppo_hard",
    "apo_zero",
    "apo_down",
    "discopop",
)

_GRPO = {
    **dict.fromkeys(("grpo", "dr_grpo", "sapo", "luspo"), shares.ROWS),
    **dict.fromkeys(("dapo", "cispo", "vespo"), shares.SUM),
    "bnpo": shares.COMPLETION_TOKENS,
}

_NOT_ADDITIVE = {
    "KTOTrainer": "its KL baseline is a mean over the micro-batch",
    "BCOTrainer": "its reward baseline is a mean over the micro-batch",
    "SentenceTransformerTrainer": "its losses compare each example with the others of the "
    "micro-batch",
}

_COUPLED_MODELS = {
    "PaliGemmaForConditionalGeneration": "a row without padding is computed differently when no "
    "other row is padded",
}


def family_of(
    trainer: HfTrainer, compute_loss: Callable[..., Any] | None = None, *, is_vouched: bool = False
) -> Family | NoFamily:
    """Find the family of a loss, or say why it has none; a vouched one is a sum or a mean."""
    compute_loss = compute_loss or trainer.compute_loss
    found = _family_of(trainer, compute_loss)
    if isinstance(found, NoFamily) and found.can_vouch and not is_vouched:
        found = _family_behind(trainer, compute_loss) or found
    is_causal = isinstance(found, Family) and shares.NEXT_TOKENS in found.weights
    if is_causal and _is_regularized(trainer):
        return NoFamily(
            "AdaLoRA adds a term to the loss of each forward pass (orth_reg_weight), even of each "
            "piece: set orth_reg_weight=0, or use LoRA"
        )
    if isinstance(found, NoFamily):
        if not (found.can_vouch and is_vouched):
            return found
        found = _VOUCHED
    boundary = rope_boundary(trainer.model)
    if boundary is None:
        return found
    return replace(found, layouts=tuple(type(layout)(boundary) for layout in found.layouts))


def _is_regularized(trainer: HfTrainer) -> bool:
    """Tell whether AdaLoRA adds a term (peft, AdaLoraModel.forward) to a sum over the window."""
    tuner = getattr(trainer.model, "base_model", None)
    configs = getattr(tuner, "peft_config", None)
    adapter = getattr(tuner, "trainable_adapter_name", None)
    weight = getattr(configs[adapter], "orth_reg_weight", 0) if configs and adapter else 0
    return bool(weight) and trainer.model_accepts_loss_kwargs


def _family_behind(
    trainer: HfTrainer, compute_loss: Callable[..., Any]
) -> Family | NoFamily | None:
    known = whose_loss(trainer, compute_loss)
    if known is None or callable(trainer.compute_loss_func):
        return None
    family = _family_of_class(trainer, known)
    return replace(family, delegated_to=known) if isinstance(family, Family) else family


def _family_of(trainer: HfTrainer, compute_loss: Callable[..., Any]) -> Family | NoFamily:
    kinds = type(trainer).__mro__
    for kind in kinds:
        if kind.__name__ in _NOT_ADDITIVE:
            why = _NOT_ADDITIVE[kind.__name__]
            return NoFamily(f"the loss of {type(trainer).__name__} cannot be divided: {why}")
    if callable(trainer.compute_loss_func):  # trl's GRPO passes a string as a marker
        return _unknown(
            "compute_loss_func is a loss of your own, and whether it can be divided is not known"
        )
    # TRL's trainers have a second method by that name, which is the one to override.
    owner = next(c for c in kinds if vars(c).keys() & {"compute_loss", "_compute_loss"})
    library = owner.__module__.partition(".")[0]
    here = getattr(compute_loss, "__module__", "").partition(".")[0]
    if library in ("transformers", "trl") and here != library:
        return NoFamily(
            "trainer.compute_loss was replaced already: by survive_oom, which detaches, or by you"
        )
    return _family_of_class(trainer, owner)


def _family_of_class(trainer: HfTrainer, owner: type) -> Family | NoFamily:
    find = _BY_TRAINER.get((owner.__module__.partition(".")[0], owner.__name__))
    if find is None:
        return _unknown(f"{owner.__name__}.compute_loss is not known to be a sum over examples")
    return find(trainer)


def _family_of_model(trainer: HfTrainer) -> Family | NoFamily:
    model = base_model(trainer.model)
    kind, loss = type(model).__name__, getattr(model, "loss_type", None)
    if kind in _COUPLED_MODELS:
        return NoFamily(f"{kind} cannot be divided: {_COUPLED_MODELS[kind]}")
    names = inspect.signature(model.forward).parameters.keys()
    if "return_loss" in names:
        return NoFamily(
            f"the loss of {kind} compares each example with the others of the micro-batch"
        )
    owner = next(c for c in type(model).__mro__ if "forward" in vars(c))
    if not owner.__module__.startswith("transformers."):
        return _unknown(
            f"{owner.__name__}.forward is not that of transformers, and whether its loss can be "
            "divided is not known"
        )
    if "_loss_function" in vars(model):
        return _unknown(
            f"the loss_function of {kind} was replaced, and whether it can be divided is not known"
        )
    if replaced := what_replaces_the_loss(trainer.model):
        return _unknown(f"{replaced}, and whether that loss can be divided is not known")
    if loss == "ForConditionalGeneration" and model.config.is_encoder_decoder:
        return _ALIGNED
    # Others of that name have labels instead, or search beams with a loss for each.
    if loss == "ForQuestionAnswering" and {*shares.ANSWERS} <= names and "cls_index" not in names:
        return _ANSWERS
    if loss is None and kind.endswith("LMHeadModel"):
        return _CAUSAL
    if loss in _BY_MODEL:
        return _BY_MODEL[loss]
    return _unknown(
        f"the loss of {kind} (loss_type={loss!r}) is not known to be a sum over examples"
    )


def _family_of_sft(trainer: HfTrainer) -> Family | NoFamily:
    if replaced := what_replaces_the_loss(trainer.model):
        return _unknown(f"{replaced}, and whether that loss can be divided is not known")
    # trl before 1.3 averages entropy over prompts too; with Liger there is an accuracy instead.
    return (
        _CAUSAL if trainer.args.use_liger_kernel else replace(_CAUSAL, share=shares.ATTENDED_TOKENS)
    )


def _family_of_dpo(trainer: Any) -> Family | NoFamily:
    kinds = trainer.args.loss_type
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if unknown := [kind for kind in kinds if kind not in _DPO]:
        return NoFamily(f"the DPO loss {unknown[0]!r} is not a mean over pairs")
    if getattr(trainer.args, "rpo_alpha", None) is not None:
        return NoFamily(
            "rpo_alpha adds a mean over tokens to a mean over pairs: no weight fits both"
        )
    if getattr(trainer, "padding_free", False):
        return NoFamily("DPO with padding_free is not supported yet")
    # trl before 1.0 has own names for chosen and rejected, with one row a pair.
    return _ROWS if hasattr(trainer, "concatenated_inputs") else _PAIRS


def _family_of_grpo(trainer: Any) -> Family | NoFamily:
    kind = trainer.loss_type
    if kind not in _GRPO:
        return NoFamily(f"the GRPO loss {kind!r} is not known to be a sum over completions")
    if trainer.top_entropy_quantile < 1.0:
        return NoFamily("top_entropy_quantile compares all completions of a micro-batch")
    if getattr(trainer, "_entropy_bonus_enabled", False):
        return NoFamily("entropy_coef and use_adaptive_entropy add a mean that is over all tokens")
    if getattr(trainer, "use_liger_loss", False):
        return NoFamily("GRPO with use_liger_loss is not supported: its kernel's loss is not known")
    return replace(_COMPLETIONS, weights=(_GRPO[kind],))


_BY_TRAINER: dict[tuple[str, str], Callable[[HfTrainer], Family | NoFamily]] = {
    ("transformers", "Trainer"): _family_of_model,
    ("trl", "SFTTrainer"): _family_of_sft,
    ("trl", "RewardTrainer"): lambda _: _PAIRS,
    ("trl", "DPOTrainer"): _family_of_dpo,
    ("trl", "GRPOTrainer"): _family_of_grpo,
    ("trl", "RLOOTrainer"): lambda _: _COMPLETIONS,
}  # what computes the loss, by the library and the name of the class
