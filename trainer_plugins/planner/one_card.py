"""Run on one card: what a way to divide work among cards can change. Imports torch."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from trainer_plugins.hf_trainer import HfTrainer
from trainer_plugins.planner.tracing.trace import Tracker


class OneCard:
    """Keeps everything on one card. Other strategies derive from it."""

    not_predicted: tuple[str, ...] = ()  # memory of such a run that its figures leave out
    not_reliable: tuple[str, ...] = ()  # which of its figures are less reliable, and why

    @contextlib.contextmanager
    def around(self, tracker: Tracker) -> Iterator[None]:
        """Replace what has to be replaced while the Trainer is built and runs."""
        yield

    def prepare(self, trainer: HfTrainer) -> None:
        """Refuse a Trainer that cannot be predicted under this strategy, before it runs."""

    def save(self, trainer: HfTrainer, tracker: Tracker) -> None:
        """Copy the weights to the host one by one, as save_pretrained and torch.save do."""
        with tracker.during("save"):
            copy_to_host(trainer.model.state_dict())

    def resume(self, trainer: HfTrainer, tracker: Tracker) -> None:
        """Load the optimizer's states to the host and move them to the card, as resuming does."""
        optimizer = bare_optimizer(trainer)
        if optimizer is None:
            return
        with tracker.during("resume"):
            loaded = mapped(optimizer.state_dict(), torch.Tensor, lambda each: each.to("cpu"))
            optimizer.state.clear()  # a new optimizer has no states
            optimizer.load_state_dict(loaded)
            tag_states(optimizer, tracker)


def mapped(content: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """Change all values of one class in dicts, lists and tuples, also of libraries' own dicts."""
    if isinstance(content, kind):
        return change(content)
    if isinstance(content, dict):
        return {key: mapped(each, kind, change) for key, each in content.items()}
    if type(content) in (list, tuple):
        return type(content)(mapped(each, kind, change) for each in content)
    return content


def copy_to_host(states: Mapping[str, torch.Tensor]) -> None:
    """Copy tensors to the host, one after the other."""
    for tensor in states.values():
        tensor.to("cpu")


def tag_states(optimizer: torch.optim.Optimizer, tracker: Tracker) -> None:
    """Give the states of an optimizer their category."""
    states: Iterable[object] = (s for each in optimizer.state.values() for s in each.values())
    tracker.tag(states, "optimizer states")


def bare_optimizer(trainer: HfTrainer) -> torch.optim.Optimizer | None:
    """Return the optimizer without accelerate's wrapper; None if the Trainer has none yet."""
    bare: torch.optim.Optimizer | None = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    return bare
