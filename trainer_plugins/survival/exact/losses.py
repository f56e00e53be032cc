"""Losses: which of them are sums over examples, by the class that computes them.

No measurement proves that examples are independent (KTO's loss is additive at step 0). So we list
the losses that we allow, and measure each before use (`certificate.py`). All others are refused.
"""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from trainer_plugins.accumulation.effect import OVER_ROWS
from trainer_plugins.accumulation.modules import COUPLED_MODELS, rope_boundary
from trainer_plugins.hf_trainer import HfTrainer
from trainer_plugins.oldest import too_old
from trainer_plugins.survival.exact import coupled, shares
from trainer_plugins.survival.exact.coupled import Coupling, Seam
from trainer_plugins.survival.exact.layouts import Completions, Layout, Packed, Pairs, Rows
from trainer_plugins.survival.exact.own_loss import find_owner, find_replaced_loss
from trainer_plugins.wrapped import base_model


class Family(NamedTuple):
    """The common properties of one kind of losses."""

    layouts: tuple[Layout, ...]  # possible arrangements of examples, tried in order
    weights: tuple[shares.Weight, ...]  # candidates, between which a measurement decides
    share: shares.Weight  # the weight for averaging logged metrics over pieces
    coupling: Coupling | None = None  # how a part depends on the whole
    is_vouched: bool = False  # the user says that the loss is of one of these kinds
    delegated_to: type | None = None  # the user's `compute_loss` may only call this one's


VOUCH = (
    " (if it is a sum or a mean over examples, and compares none with another, pass"
    " vouch_for_loss=True: survival then measures that)"
)


class NoFamily(NamedTuple):
    """The reason a loss belongs to no family."""

    why: str
    can_vouch: bool = False  # it may be a sum: if the user vouches, we measure it

    @property
    def words(self) -> str:
        return self.why + VOUCH if self.can_vouch else self.why


def _unknown(why: str) -> NoFamily:
    return NoFamily(why, can_vouch=True)


def _unclear(why: str, loss: str) -> NoFamily:
    return _unknown(f"{why}, and it is unknown whether {loss} can be split")


# Llama shifts its labels, XLM does not.
_CAUSAL = Family(
    (Packed(), Rows()), (shares.SUM, shares.NEXT_TOKENS, shares.TOKENS), shares.NEXT_TOKENS
)
_NEXT_TOKENS = Family((Rows(),), (shares.SUM, shares.NEXT_TOKENS), shares.NEXT_TOKENS)
_ALIGNED = Family((Rows(),), (shares.SUM, shares.TOKENS), shares.TOKENS)
_TAGS = Family((Rows(),), (shares.SUM, shares.TOKENS, shares.TOKENS_IN_SIGHT), shares.TOKENS)
_CLASSES = Family((Rows(),), (shares.LABELLED_ROWS, shares.ROWS, shares.SUM), shares.ROWS)
_ANSWERS = Family((Rows(),), (shares.ANSWERED_ROWS, shares.ROWS), shares.ROWS)
_ROWS = Family((Rows(),), (shares.ROWS,), shares.ROWS)
_SPEECH = Family((Rows(),), (shares.ROWS, shares.SUM), shares.ROWS)
_COMPLETIONS = Family((Completions(),), (shares.ROWS,), shares.COMPLETION_TOKENS)
_PAIRS = Family((Pairs(),), (shares.ROWS,), shares.ROWS)
# For losses that compare rows (`Seam`).
_SEEN_ROWS = Family((Rows(),), (shares.ALL_ROWS,), shares.ROWS)
_SEEN_PAIRS = Family((Pairs(),), (shares.ALL_ROWS,), shares.ROWS)
_VOUCHED = Family(
    (Packed(), Rows()),
    (shares.SUM, shares.NEXT_TOKENS, shares.TOKENS, shares.LABELLED_ROWS, shares.ROWS),
    shares.ROWS,
    is_vouched=True,
)

# By `model.loss_type`, which transformers derives from the model's class (LOSS_MAPPING).
_BY_MODEL = {
    "ForCausalLM": _CAUSAL,
    "ForConditionalGeneration": _CAUSAL,
    "ForMaskedLM": _ALIGNED,
    "ForTokenClassification": _TAGS,
    **dict.fromkeys(OVER_ROWS, _CLASSES),
}

# By the end of the class name, for models without a loss_type: their loss is in `forward`.
_BY_NAME = {
    "ForMultipleChoice": _CLASSES,
    "ForNextSentencePrediction": _CLASSES,
    "ForEntityClassification": _CLASSES,
    "ForEntityPairClassification": _CLASSES,
    "ForXVector": _CLASSES,
    "ForAudioFrameClassification": _ROWS,
    "ForCTC": _SPEECH,
    "ForSpeechToText": _ALIGNED,
    "ForTextToText": _ALIGNED,
    "ForCausalImageModeling": _NEXT_TOKENS,
}

_DPO = (
    "sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "sppo_hard",
    "apo_zero", "apo_down", "discopop", "sft", "bco_pair",
)  # fmt: skip
_DPO_SORTED = ("aot", "aot_unpaired")  # these compare pairs

_GRPO = {
    **dict.fromkeys(("grpo", "dr_grpo", "sapo", "luspo"), shares.ROWS),
    **dict.fromkeys(("dapo", "cispo", "vespo"), shares.SUM),
    "bnpo": shares.COMPLETION_TOKENS,
}

# In CLIP, SigLIP and others, rows pass through these independently; embeddings are compared.
_TOWERS = ("text_model", "vision_model")


def family_of(
    trainer: HfTrainer, compute_loss: Callable[..., Any] | None = None, *, is_vouched: bool = False
) -> Family | NoFamily:
    """Find the family of a loss, or why it has none; a vouched loss is a sum or a mean."""
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
    return found._replace(layouts=tuple(type(layout)(boundary) for layout in found.layouts))


def _is_regularized(trainer: HfTrainer) -> bool:
    """Return whether AdaLoRA (peft, AdaLoraModel.forward) adds a term to a sum over the window."""
    tuner = getattr(trainer.model, "base_model", None)
    configs = getattr(tuner, "peft_config", None)
    adapter = getattr(tuner, "trainable_adapter_name", None)
    weight = getattr(configs[adapter], "orth_reg_weight", 0) if configs and adapter else 0
    return bool(weight) and trainer.model_accepts_loss_kwargs


def _family_behind(
    trainer: HfTrainer, compute_loss: Callable[..., Any]
) -> Family | NoFamily | None:
    known = find_owner(trainer, compute_loss)
    if known is None or callable(trainer.compute_loss_func):
        return None
    family = _family_of_class(trainer, known)
    return family._replace(delegated_to=known) if isinstance(family, Family) else family


def _family_of(trainer: HfTrainer, compute_loss: Callable[..., Any]) -> Family | NoFamily:
    kinds = type(trainer).__mro__
    if any(kind.__module__.startswith("trl.") for kind in kinds) and (why := too_old("trl")):
        return NoFamily(why)
    if any(kind.__name__ == "BCOTrainer" for kind in kinds):
        why = "its reward baseline is a mean over the micro-batch"
        return NoFamily(f"the loss of {type(trainer).__name__} cannot be split: {why}")
    if callable(trainer.compute_loss_func):  # TRL's GRPO passes a string as a marker
        return _unclear("compute_loss_func is a custom loss", "it")
    # TRL's trainers have a second method of that name, which is the one to override.
    owner = next(c for c in kinds if vars(c).keys() & {"compute_loss", "_compute_loss"})
    library = owner.__module__.partition(".")[0]
    here = getattr(compute_loss, "__module__", "").partition(".")[0]
    if library in ("transformers", "trl") and here != library:
        return NoFamily(
            "something has replaced trainer.compute_loss already: your code, or an earlier"
            " survive_oom, which you can detach"
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
    if kind in COUPLED_MODELS:
        return NoFamily(f"{kind} cannot be divided: {COUPLED_MODELS[kind]}")
    names = inspect.signature(model.forward).parameters.keys()
    if "return_loss" in names:
        towers = [child for name, child in model.named_children() if name in _TOWERS]
        if len(towers) < 2:
            return NoFamily(
                f"the loss of {kind} compares each example with the others of the micro-batch"
            )
        return _SEEN_ROWS._replace(coupling=Seam(trainer, towers))
    owner = next(c for c in type(model).__mro__ if "forward" in vars(c))
    if not owner.__module__.startswith("transformers."):
        return _unclear(f"{owner.__name__}.forward is not that of transformers", "its loss")
    if "_loss_function" in vars(model):
        return _unclear(f"the loss_function of {kind} was replaced", "it")
    if replaced := find_replaced_loss(trainer.model):
        return _unclear(replaced, "that loss")
    if loss == "ForConditionalGeneration" and model.config.is_encoder_decoder:
        return _ALIGNED
    # Others of that name have labels instead, or search beams with a loss for each.
    if loss == "ForQuestionAnswering" and {*shares.ANSWERS} <= names and "cls_index" not in names:
        return _ANSWERS
    if loss is None and kind.endswith("LMHeadModel"):
        return _CAUSAL
    if loss in _BY_MODEL:
        return _BY_MODEL[loss]
    if named := [family for ending, family in _BY_NAME.items() if kind.endswith(ending)]:
        return named[0]
    return _unknown(
        f"the loss of {kind} (loss_type={loss!r}) is not known to be a sum over examples"
    )


def _family_of_sft(trainer: HfTrainer) -> Family | NoFamily:
    if replaced := find_replaced_loss(trainer.model):
        return _unclear(replaced, "that loss")
    # trl before 1.3 also averages entropy over prompts; with Liger there is an accuracy instead.
    share = _CAUSAL.share if trainer.args.use_liger_kernel else shares.ATTENDED_TOKENS
    return _CAUSAL._replace(share=share)


def _family_of_dpo(trainer: Any) -> Family | NoFamily:
    kinds = trainer.args.loss_type
    kinds = {*kinds} if isinstance(kinds, list) else {kinds}
    if unknown := sorted(kinds - {*_DPO, *_DPO_SORTED}):
        return NoFamily(f"the DPO loss {unknown[0]!r} is not a mean over pairs")
    if "sft" in kinds and trainer.args.use_weighting:  # trl 1.16 itself fails with several pairs
        return NoFamily('DPO\'s "sft" with use_weighting multiplies two means over the micro-batch')
    if kinds & {*_DPO_SORTED}:
        return _find_seam(trainer, _SEEN_PAIRS)
    return _PAIRS._replace(coupling=coupled.dpo_with_sft(trainer)) if "sft" in kinds else _PAIRS


def _find_seam(trainer: Any, family: Family) -> Family | NoFamily:
    """Put the seam around models that return few numbers per token, and no logits (trl 1.16)."""
    own = next(kind for kind in type(trainer).__mro__ if kind.__module__.startswith("trl."))
    if "fused_lm_head" not in inspect.getsource(own):
        return NoFamily(
            f"the loss of {own.__name__} compares rows, and this trl would keep all logits:"
            " install trl 1.16 or newer"
        )
    models = [trainer.model, *([ref] if (ref := trainer.ref_model) is not None else [])]
    return family._replace(coupling=Seam(trainer, models))


_SENTENCES = {"SentenceTransformerTrainer", "MultiVectorEncoderTrainer"}  # the second as ColBERT


def _family_of_sentences(trainer: Any) -> Family | NoFamily:
    if not _SENTENCES & {kind.__name__ for kind in type(trainer).__mro__}:
        return _unknown(f"the losses of {type(trainer).__name__} are not known")
    losses = trainer.loss.values() if isinstance(trainer.loss, dict) else [trainer.loss]
    weights = {*trainer.model.parameters()}
    for loss in losses:
        name = type(loss).__name__
        if any("Cached" in type(part).__name__ for part in loss.modules()):
            return NoFamily(f"{name} computes its own pieces: set its mini_batch_size instead")
        gathers = any(getattr(part, "gather_across_devices", False) for part in loss.modules())
        if gathers and trainer.args.world_size > 1:
            return NoFamily(
                f"{name} with gather_across_devices compares rows of all ranks: leave it out, or "
                "take a loss that computes its own pieces, such as "
                "CachedMultipleNegativesRankingLoss with mini_batch_size"
            )
        if not {*loss.parameters()} <= weights:
            return NoFamily(f"{name} has weights outside the model, which survival does not track")
    return _SEEN_ROWS._replace(coupling=Seam(trainer, [trainer.model]))


def _family_of_grpo(trainer: Any) -> Family | NoFamily:
    kind = trainer.loss_type
    if kind not in _GRPO:
        return NoFamily(f"the GRPO loss {kind!r} is not known to be a sum over completions")
    if trainer.top_entropy_quantile < 1.0:
        return NoFamily("top_entropy_quantile compares all completions of a micro-batch")
    if getattr(trainer, "_entropy_bonus_enabled", False):
        return NoFamily("entropy_coef and use_adaptive_entropy add a mean over all tokens")
    if getattr(trainer, "use_liger_loss", False):
        return NoFamily("GRPO with use_liger_loss is not supported: its kernel's loss is not known")
    return _COMPLETIONS._replace(weights=(_GRPO[kind],))


_BY_TRAINER: dict[tuple[str, str], Callable[[HfTrainer], Family | NoFamily]] = {
    ("transformers", "Trainer"): _family_of_model,
    ("sentence_transformers", "SentenceTransformerTrainer"): _family_of_sentences,
    ("sentence_transformers", "BaseTrainer"): _family_of_sentences,  # since 5.5
    ("trl", "SFTTrainer"): _family_of_sft,
    ("trl", "RewardTrainer"): lambda _: _PAIRS,
    ("trl", "DPOTrainer"): _family_of_dpo,
    ("trl", "ORPOTrainer"): lambda trainer: _ROWS._replace(coupling=coupled.orpo(trainer)),
    ("trl", "CPOTrainer"): lambda trainer: _ROWS._replace(coupling=coupled.cpo(trainer)),
    ("trl", "KTOTrainer"): lambda trainer: _find_seam(trainer, _SEEN_ROWS),
    ("trl", "GKDTrainer"): lambda _: _NEXT_TOKENS,
    ("trl", "GRPOTrainer"): _family_of_grpo,
    ("trl", "RLOOTrainer"): lambda _: _COMPLETIONS,
}  # by the library and the name of the class that computes the loss
