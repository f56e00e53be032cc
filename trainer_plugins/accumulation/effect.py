"""Judge whether smaller micro-batches, and more of them, preserve the gradient of a step.

The Trainer counts the labels in all micro-batches of a step and passes the count to the loss as
`num_items_in_batch`. If the model "accepts loss kwargs" (its forward has `**kwargs`), the Trainer
trusts the loss to divide by that count, and does not divide by the number of micro-batches. Many
losses ignore it and return a mean over their micro-batch; the gradient of the step is then the sum
of these means. With `average_tokens_across_devices` it is also multiplied by the number of ranks.
"""

import inspect
from collections.abc import Collection
from typing import Any

from torch import nn

from trainer_plugins.accumulation import Accumulation, Effect
from trainer_plugins.accumulation.loss_code import Code, Reading, Use, read_code, uses_labels
from trainer_plugins.accumulation.modules import COUPLED_MODELS, find_coupled_modules
from trainer_plugins.hf_trainer import HfTrainer
from trainer_plugins.wrapped import base_model

# Values of `model.loss_type` for losses that average over rows: equal micro-batches weigh the same.
OVER_ROWS = (
    "ForSequenceClassification",
    "ForImageClassification",
    "ForVideoClassification",
    "ForAudioClassification",
)
# Answers outside their row are not counted.
_OVER_LABELS = (
    "ForCausalLM", "ForConditionalGeneration", "ForMaskedLM", "ForTokenClassification",
    "ForQuestionAnswering",
)  # fmt: skip
_ANSWERS = ("start_positions", "end_positions")
_COMPARES_ROWS = ("KTOTrainer", "BCOTrainer", "SentenceTransformerTrainer")


def judge_accumulation(
    trainer: HfTrainer, batch_names: Collection[str] | None = None
) -> Accumulation:
    """Judge from the code of a loss how accumulation changes its gradient, without running it.

    `batch_names` are the keys of a collated batch, if you know them.
    """
    model = base_model(trainer.model)
    try:
        found = _judge(trainer, model, batch_names)
        if found.effect is Effect.SCALED or not (why := _name_coupling(trainer, model)):
            return found
        return Accumulation(Effect.OTHER, why)
    except (AttributeError, LookupError, TypeError, ValueError) as error:  # unknown types
        why = f"the code of its loss could not be read ({type(error).__name__}: {error})"
        return Accumulation(Effect.UNKNOWN, why)


def _judge(
    trainer: HfTrainer, model: nn.Module, batch_names: Collection[str] | None
) -> Accumulation:
    own_step = _owner(trainer, "training_step")
    if _library(own_step) not in ("transformers", "trl"):
        return Accumulation(Effect.UNKNOWN, f"{own_step.__name__}.training_step is your own")
    if _is_said_by_trl(trainer):
        return Accumulation(Effect.SAME, "TRL divides its loss, or has the Trainer divide it")
    # `survive_oom` replaces the method on the object and calls the class's, so read the class's.
    code = Code(None, trainer, None, model).method("compute_loss")
    read = read_code(code)
    is_counted = _is_counted(trainer, code, read, batch_names)
    if is_counted is None:
        return Accumulation(Effect.UNKNOWN, "whether its batches have `labels` is not known")
    is_scaled = getattr(trainer, "loss_is_scaled_for_ga", None)  # since transformers 5.19
    if is_scaled is None:
        is_scaled = is_counted or trainer.compute_loss_func is not None
    if is_scaled:
        return _judge_undivided(trainer, model, read, is_counted)
    return _judge_divided(trainer, model, read, is_counted)


def _judge_undivided(
    trainer: HfTrainer, model: Any, read: Reading, is_counted: bool
) -> Accumulation:
    """Judge a loss that the Trainer leaves undivided because it trusts the loss to divide."""
    if read.use is Use.UNKNOWN:
        return Accumulation(Effect.UNKNOWN, f"what {read.where} does is not known")
    if read.use is Use.DIVIDES and is_counted:
        if _adds_router_loss(trainer, model):
            why = "each micro-batch adds the whole router_aux_loss_coef of its experts"
            return Accumulation(Effect.OTHER, why)
        return Accumulation(Effect.SAME, f"{read.where} divides by the labels of the whole step")
    if read.reduction == "sum":
        return Accumulation(Effect.SAME, f"{read.where} returns a sum over its micro-batch")
    if read.reduction != "mean":
        return Accumulation(
            Effect.UNKNOWN, f"{read.where} ignores num_items_in_batch; whether it is a mean is open"
        )
    is_multiplied = read.is_by_trainer and trainer.args.average_tokens_across_devices
    why = f"{read.where} ignores num_items_in_batch, and returns a mean over its micro-batch"
    return Accumulation(Effect.SCALED, why, is_multiplied and is_counted, _cure(trainer))


def _cure(trainer: HfTrainer) -> str:
    """Return the change that turns a scaled gradient back into the intended mean."""
    if trainer.compute_loss_func is not None:
        return "divide a sum by num_items_in_batch in your compute_loss_func"
    if getattr(trainer, "loss_is_scaled_for_ga", None):
        return "set trainer.loss_is_scaled_for_ga = False"
    return "set trainer.model_accepts_loss_kwargs = False"


def _adds_router_loss(trainer: HfTrainer, model: Any) -> bool:
    """Return whether a mixture of experts adds an undivided mean over its micro-batch."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    is_on = getattr(text, "output_router_logits", False) is True
    is_trls = _library(_owner(trainer, "compute_loss")) == "trl"  # TRL divides it
    return is_on and not is_trls and bool(getattr(text, "router_aux_loss_coef", 0))


def _judge_divided(trainer: HfTrainer, model: Any, read: Reading, is_counted: bool) -> Accumulation:
    """Judge a loss that the Trainer divides by the number of micro-batches: a mean of means."""
    if read.use is Use.DIVIDES and is_counted:
        return Accumulation(Effect.OTHER, f"{read.where} and the Trainer both divide the loss")
    loss_type = getattr(model, "loss_type", None)
    is_stock = _library(_owner(trainer, "compute_loss")) == "transformers"
    if is_stock and loss_type in OVER_ROWS:
        return Accumulation(Effect.SAME, "it averages the means of equally many rows")
    if is_stock and loss_type in _OVER_LABELS:
        why = "it averages the means of micro-batches, however many labels each of them has"
        return Accumulation(Effect.OTHER, why)
    return Accumulation(Effect.UNKNOWN, f"what {read.where} averages over is not known")


def _name_coupling(trainer: HfTrainer, model: nn.Module) -> str:
    """Return why a row depends on others in its micro-batch; empty if rows are independent."""
    kinds = [kind.__name__ for kind in type(trainer).__mro__]
    compared = next((kind for kind in kinds if kind in _COMPARES_ROWS), "")
    if "return_loss" in inspect.signature(model.forward).parameters:
        compared = type(model).__name__
    if compared:
        return f"the loss of {compared} compares the rows of a micro-batch"
    coupled = COUPLED_MODELS.get(type(model).__name__)
    return coupled or next(find_coupled_modules(model), "")


def _is_counted(
    trainer: HfTrainer, code: Code, read: Reading, batch_names: Collection[str] | None
) -> bool | None:
    """Return whether the Trainer counts labels; None if it is unknown whether batches have any."""
    if not trainer.model_accepts_loss_kwargs and trainer.compute_loss_func is None:
        return False
    if batch_names is not None:
        return "labels" in batch_names
    library = _library(_owner(trainer, "compute_loss"))
    if library == "trl" and read.use is Use.DIVIDES:
        return True
    if library == "trl" or (library != "transformers" and not uses_labels(code)):
        return None
    forward: Any = base_model(trainer.model).forward
    names = getattr(trainer, "label_names", None) or inspect.signature(forward).parameters
    has_targets = any(name in names for name in ("labels", *_ANSWERS))
    return "labels" in names if has_targets else None


def _is_said_by_trl(trainer: HfTrainer) -> bool:
    """Return whether TRL computes the loss itself and has told the Trainer how it is scaled."""
    if _library(_owner(trainer, "compute_loss")) != "trl":
        return False
    is_old = isinstance(trainer.compute_loss_func, str)  # TRL's marker for an old transformers
    return is_old or getattr(trainer, "loss_is_scaled_for_ga", None) is not None


def _owner(trainer: HfTrainer, name: str) -> type:
    return next(kind for kind in type(trainer).__mro__ if name in vars(kind))


def _library(kind: Any) -> str:
    return str(kind.__module__).partition(".")[0]
