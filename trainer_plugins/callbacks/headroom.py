"""Headroom: reserves part of the GPU for memory outside torch's allocator."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from trainer_plugins.callbacks._run import RunCallback, put_around
from trainer_plugins.hf_trainer import HfTrainer

logger = logging.getLogger(__name__)


class Headroom(RunCallback):
    """Keeps torch's allocator from taking the whole GPU while a Trainer trains.

    >>> callback = Headroom(leave_fraction=0.1)  # Trainer(..., callbacks=[callback])

    NCCL, cuBLAS and CUDA contexts allocate outside torch, and fail if torch's cache fills the GPU.
    With this guard the allocator frees its cache earlier: at the limit, not only when the GPU is
    full. The previous limit is restored when `train()` returns or raises.

    Cost: tensors cannot use the memory set aside, so a run that needs it runs out of memory
    earlier. The first guard in a process wraps one method of `transformers.Trainer`.

    Args:
        leave_fraction: the fraction of the GPU for everything outside torch's allocator, including
            memory already in use there. With a plan: `1 - plan.reserved_peak_bytes /
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
