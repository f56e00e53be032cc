"""Headroom: torch leaves a part of the card to what is outside its allocator."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from trainer_plugins.callbacks._run import RunCallback, put_around
from trainer_plugins.hf_trainer import HfTrainer

logger = logging.getLogger(__name__)


class Headroom(RunCallback):
    """Keeps torch's allocator from taking all of the card while a Trainer trains.

    NCCL, cuBLAS and CUDA's contexts take memory outside the allocator, and fail if its cache fills
    the card. With the guard the allocator releases its cache earlier: at the limit, and not only
    when the card is full. When `train()` returns or raises, the previous limit is restored.

    Cost: what is left free is lost for tensors; a run that needs it runs out of memory earlier. The
    first guard of a process wraps one method of `transformers.Trainer`.

    Args:
        leave_fraction: the fraction of the card for everything outside torch's allocator, including
            what is there already. With a plan: `1 - plan.reserved_peak_bytes /
            plan.capacity_bytes`.
    """

    def __init__(self, leave_fraction: float = 0.05) -> None:
        if not 0 < leave_fraction < 1:
            raise ValueError(f"leave_fraction is a part of the card, 0 to 1, got {leave_fraction}")
        super().__init__()
        self.leave_fraction = leave_fraction
        put_around("train", Headroom, Headroom.around_train)

    @contextmanager
    def around_train(self, trainer: HfTrainer, *args: object, **kwargs: object) -> Iterator[None]:
        device = trainer.args.device
        module = torch.get_device_module(device)
        if not hasattr(module, "get_per_process_memory_fraction"):
            logger.info("Headroom does nothing: the allocator of %s has no limit", device.type)
            yield
            return
        before = module.get_per_process_memory_fraction(device)
        module.set_per_process_memory_fraction(min(before, 1 - self.leave_fraction), device)
        try:
            yield
        finally:
            module.set_per_process_memory_fraction(before, device)
