"""Kinds: list the kinds of ranks, and tell which of them a run is."""

from torch import nn

from trainer_plugins.hf_trainer import HfTrainer
from trainer_plugins.survival.ranks.alone import Alone
from trainer_plugins.survival.ranks.ddp import DDP
from trainer_plugins.survival.ranks.fsdp2 import FSDP2
from trainer_plugins.survival.ranks.protocol import Ranks
from trainer_plugins.survival.ranks.zero import Zero

KINDS: tuple[type[Ranks], ...] = (Zero, DDP, FSDP2, Alone)
"""All kinds, in the order of asking; the last takes every run, and refuses unknown ones."""


def kind_of(trainer: HfTrainer, model: nn.Module | None = None) -> type[Ranks]:
    """Say how the ranks of a run share a micro-batch.

    Args:
        trainer: the Trainer of the run.
        model: the model as the Trainer calls it; None before the first micro-batch.
    """
    return next(kind for kind in KINDS if kind.is_kind(trainer, model))
