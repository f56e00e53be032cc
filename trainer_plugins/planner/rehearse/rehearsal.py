"""Define the settings from which a plan's process builds a Trainer, and the Trainer it builds."""

from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_map_only

from trainer_plugins.hf_trainer import HfTrainer
from trainer_plugins.planner.rehearse.streamed import Streaming

Batch = dict[str, object]


class Build(NamedTuple):
    """Holds the settings for building a Trainer, besides its source."""

    args: Any  # the user's, for a run of three steps that writes nothing
    has_padding: bool | None  # whether batches have padding; None: the source decides
    streaming: Streaming | None


@dataclass(slots=True)
class Rehearsed:
    """Holds a Trainer with its model on the card, and its batches."""

    trainer: HfTrainer
    batch: Batch
    evaluation_batch: Batch | None  # None if the run does not evaluate
    has_padding: bool = False  # whether to pad batches; a user's own batches stay as they are
    assumptions: list[str] = field(default_factory=list)


def other_models(trainer: HfTrainer) -> list[torch.nn.Module]:
    """Return the models that a Trainer holds but does not train: reference, teacher, reward."""
    trained = {id(trainer.model), id(getattr(trainer, "model_wrapped", None))}
    held = (*vars(trainer).values(), *getattr(trainer, "reward_funcs", ()))
    others = {id(value): value for value in held if isinstance(value, torch.nn.Module)}
    return [value for key, value in others.items() if key not in trained]


def loader(trainer: HfTrainer, batch: Batch, num_batches: int) -> object:
    """Return a loader with this many copies of a batch for each rank."""
    # Cards that share a row get the same batch (accelerate/data_loader.py, prepare_data_loader),
    # except under DeepSpeed, which gathers the batches of such cards.
    num_readers = trainer.accelerator.num_processes // count_sharers(trainer, "cp", "tp")
    loader: object = torch.utils.data.DataLoader(
        range(num_batches * num_readers),  # type: ignore[arg-type]
        batch_size=1,
        collate_fn=lambda _: tree_map_only(torch.Tensor, torch.clone, batch),
    )
    return trainer.accelerator.prepare_data_loader(loader)


def count_sharers(trainer: HfTrainer, *kinds: str) -> int:
    """Return how many cards work on the same rows by these kinds of parallelism: cp, sp, tp."""
    sizes = trainer.accelerator.parallelism_config  # None, or without sp_size in accelerate 1.10
    return prod(getattr(sizes, f"{kind}_size", 1) for kind in kinds)
