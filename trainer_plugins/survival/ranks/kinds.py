"""Which kind a run is."""

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer

from trainer_plugins.survival.ranks.alone import Alone
from trainer_plugins.survival.ranks.ddp import DDP


def kind_of(trainer: Trainer, model: nn.Module) -> Alone:
    """How the ranks of this run share a micro-batch.

    What is none of them was refused (`refusals.py`).
    """
    if trainer.is_deepspeed_enabled:
        from trainer_plugins.survival.ranks.zero import Zero

        return Zero(trainer, model)
    if isinstance(model, DistributedDataParallel):
        return DDP(trainer, model)
    if trainer.is_fsdp_enabled:
        from trainer_plugins.survival.ranks.fsdp2 import (
            FSDP2,
        )  # a torch without torch.distributed has no FSDP

        return FSDP2(trainer, model)
    return Alone(trainer, model)
