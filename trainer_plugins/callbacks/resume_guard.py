"""ResumeGuard: keeps a resumed run from holding its optimizer states twice."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch.optim import Optimizer

from trainer_plugins.callbacks._run import RunCallback, put_around
from trainer_plugins.hf_trainer import HfTrainer


class ResumeGuard(RunCallback):
    """Drops the optimizer's current states just before a resumed run loads its own.

    To load an FSDP2 checkpoint, torch first creates states of zeros. Until the last state is
    loaded, the GPU holds two of each, which is more than a training step needs. With the guard,
    loading takes no more than a step, and the loaded states are the same. In a single process and
    under DDP, an optimizer has no states before it loads, and DeepSpeed loads its own: the guard
    does nothing there.

    Cost: none. The first guard in a process wraps one method of `transformers.Trainer`.
    """

    def __init__(self) -> None:
        super().__init__()
        put_around("_load_optimizer_and_scheduler", ResumeGuard, ResumeGuard.around_load)

    @contextmanager
    def around_load(self, trainer: HfTrainer, checkpoint: str | None) -> Iterator[None]:
        optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
        if checkpoint is None or not isinstance(optimizer, Optimizer):
            yield
            return
        # Loading does not read them (torch/optim/optimizer.py, load_state_dict, torch 2.13). States
        # shared with the loaded dictionary stay alive in it.
        handle = optimizer.register_load_state_dict_pre_hook(lambda one, _: one.state.clear())
        try:
            yield
        finally:
            handle.remove()
