"""Say which names of a Trainer and its arguments the planner uses, as protocols.

transformers is not type-checked (its annotations take minutes to read). Private names are not
listed here: code that needs them takes the Trainer as `Any`. A name that some versions do not have
is read with `getattr`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch


class LoaderSettings(Protocol):
    """Lists the fields of accelerate's data loader settings that the planner reads."""

    split_batches: bool
    dispatch_batches: bool | None


class Arguments(Protocol):
    """Lists the fields of TrainingArguments that the planner reads."""

    accelerator_config: LoaderSettings
    device: torch.device
    do_eval: bool
    eval_accumulation_steps: int | None
    eval_strategy: object
    deepspeed: object
    fsdp: object
    gradient_accumulation_steps: int
    gradient_checkpointing: bool
    learning_rate: float
    max_steps: int
    optim: object
    per_device_eval_batch_size: int
    per_device_train_batch_size: int
    remove_unused_columns: bool
    save_only_model: bool
    save_strategy: object
    world_size: int


class AcceleratorLike(Protocol):
    """Lists the names of an Accelerator that the planner uses."""

    num_processes: int
    state: object

    def prepare_data_loader(self, data_loader: object) -> object:
        """Move each batch to the device, and give each rank its own batches."""

    def get_state_dict(self, model: object) -> dict[str, torch.Tensor]:
        """Gather the weights of a prepared model."""

    def unwrap_model(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return the model inside of what divides it."""


class StateLike(Protocol):
    """Lists the fields of a TrainerState that the planner reads."""

    global_step: int


class TrainerLike(Protocol):
    """Lists the public names of a Trainer that the planner uses."""

    accelerator: AcceleratorLike
    args: Arguments
    compute_loss: Callable[..., object]
    compute_metrics: object
    get_eval_dataloader: Callable[..., object]
    get_train_dataloader: Callable[..., object]
    is_deepspeed_enabled: bool
    model: torch.nn.Module
    model_wrapped: torch.nn.Module
    optimizer: torch.optim.Optimizer | None
    optimizer_cls_and_kwargs: tuple[type[torch.optim.Optimizer], dict[str, object]] | None
    state: StateLike
    prediction_step: Callable[..., object]
    training_step: Callable[..., object]

    def train(self) -> object:
        """Train to the end."""

    def evaluate(self) -> object:
        """Evaluate once."""


def fields_of(args: Any) -> dict[str, Any]:
    """Return the fields from which a dataclass of arguments can be made again."""
    given = {each.name: getattr(args, each.name) for each in fields(args) if each.init}
    if given.get("steps_per_generation"):  # TRL takes one of the two, and has made the other
        given.pop("generation_batch_size", None)
    return given


def text_of(setting: object) -> str:
    """Return the text of a setting that is a string or an enum of strings."""
    return str(getattr(setting, "value", setting))


def optimizer_name(args: Arguments) -> str:
    """Return the name of the optimizer, as in `--optim adamw_torch`."""
    return text_of(args.optim)


def bare_optimizer(trainer: TrainerLike) -> torch.optim.Optimizer | None:
    """Return the optimizer without accelerate's wrapper; None if the Trainer has none yet."""
    optimizer: torch.optim.Optimizer | None = getattr(
        trainer.optimizer, "optimizer", trainer.optimizer
    )
    return optimizer
