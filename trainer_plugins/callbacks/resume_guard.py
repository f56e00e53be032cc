"""ResumeGuard: the optimizer's states are never on the card twice when a run is resumed."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch.optim import Optimizer

from trainer_plugins.callbacks._run import RunCallback, put_around
from trainer_plugins.hf_trainer import HfTrainer


class ResumeGuard(RunCallback):
    """Drops the states that an optimizer is about to replace, before a resumed run loads its own.

    To load a checkpoint of FSDP2, torch first makes states of zeros, and then has two of each on
    the card until the last one is loaded: more than a step needs. With the guard it is as much as a
    step needs. Alone and under DDP an optimizer has no states before it loads, and DeepSpeed loads
    its own, so the guard does nothing there. The loaded states are the same.

    Cost: none. The first guard of a process wraps one method of `transformers.Trainer`.
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
        handle = optimizer.register_load_state_dict_pre_hook(_drop_states)
        try:
            yield
        finally:
            handle.remove()


def _drop_states(optimizer: Optimizer, loaded: dict[str, object]) -> None:
    # Loading does not read them (torch/optim/optimizer.py, load_state_dict, torch 2.13), and states
    # that the loaded dictionary shares stay alive in it.
    optimizer.state.clear()
