"""Handles how ranks share a micro-batch, and how one rank's failure affects the others.

To add a kind of parallelism, write it in a file of this folder, and give it its place in `kind_of`.
"""

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainer_plugins.hf_trainer import HfTrainer
from trainer_plugins.survival.ranks.alone import Ranks


def kind_of(trainer: HfTrainer, model: nn.Module | None = None) -> type[Ranks]:
    """Return the class for how ranks share a micro-batch; before training, without a model."""
    if trainer.is_deepspeed_enabled:
        from trainer_plugins.survival.ranks.zero import Zero

        return Zero
    if model is not None:
        is_ddp = isinstance(model, DistributedDataParallel)
    else:
        kind = str(trainer.accelerator.distributed_type).rpartition(".")[2]
        is_ddp = kind.startswith("MULTI_") and not trainer.is_fsdp_enabled
    if is_ddp:
        from trainer_plugins.survival.ranks.ddp import DDP

        return DDP
    if trainer.is_fsdp_enabled:
        if trainer.accelerator.state.fsdp_plugin.fsdp_version == 2:
            from trainer_plugins.survival.ranks.fsdp2 import FSDP2

            return FSDP2
        from trainer_plugins.survival.ranks.fsdp1 import FSDP1

        return FSDP1
    return Ranks  # refuses unknown kinds
