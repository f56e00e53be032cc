"""Attempt: run work that may not fit, and come back with words instead of an exception that holds the memory."""

import gc
import logging
import traceback
from collections.abc import Callable
from time import perf_counter
from typing import TypeVar

import torch

from trainer_plugins.oom import OutOfMemory, classify

T = TypeVar("T")

logger = logging.getLogger(__name__)

_NUM_FRAMES = 8


class DidNotFit:
    """An attempt that ran out of memory: what the error said, and how long the attempt took.

    Holds no tensor.
    """

    def __init__(self, error: BaseException, found: OutOfMemory, seconds: float) -> None:
        self.words = str(error)
        self.is_certain = found.is_certain
        """Whether it says that it is an out-of-memory error: a full card has cuBLAS, for one, say something else."""
        self.where = "".join(traceback.format_tb(error.__traceback__)[-_NUM_FRAMES:])
        """The last frames, in words."""
        self.seconds = seconds

    @property
    def first_line(self) -> str:
        return self.words.strip().partition("\n")[0][:300]

    def as_error(self, why_not: str) -> Exception:
        """The error once more, with what stood in the way of surviving it."""
        kind = torch.OutOfMemoryError if self.is_certain else RuntimeError
        return kind(
            f"{self.words}\nsurvive_oom could not help: {why_not}\nIt failed first in:\n{self.where}"
        )


class DidNotFitElsewhere(DidNotFit):
    """This rank's own attempt fitted; that of another did not."""

    def __init__(self) -> None:
        self.words, self.is_certain, self.where, self.seconds = (
            "another rank ran out of memory",
            True,
            "",
            0.0,
        )


def attempt(
    work: Callable[[], T],
    release: Callable[[], object] | None = None,
    device: torch.device | None = None,
) -> T | DidNotFit:
    """Run work. Where it does not fit, everything that its frames held is free when this returns.

    An exception keeps its traceback, that keeps the frames, and those keep the activations. So the
    words are kept, the frames are cleared, and nothing is retried before the `except` block is
    left, where Python drops the exception.

    Args:
        work: what is tried.
        release: called after a failure, to let go of what frames above this one hold.
        device: where its backward pass runs, if it has one.
    """
    started = perf_counter()
    try:
        return work()
    except (RuntimeError, MemoryError) as error:
        found = classify(error)
        if found is None:
            raise
        if not found.is_survivable:
            logger.warning("survive_oom does not retry this out-of-memory error: %s", found.fatal)
            raise
        failure = DidNotFit(error, found, perf_counter() - started)
        link: BaseException | None = error
        while link is not None:
            traceback.clear_frames(link.__traceback__)
            link = link.__context__
    if release is not None:
        release()
    # a graph that holds a cycle (checkpointing's does) is not freed by counting references
    gc.collect()
    if (
        device is not None and device.type != "cpu"
    ):  # whose backward passes run in the thread that calls
        _wait_for_backward_thread(device)
    return failure


def _wait_for_backward_thread(device: torch.device) -> None:
    """See to it that autograd's thread of this device has dropped the graph of a pass that failed.

    The error reaches us first, and in two of three failures the thread still held the last layer's
    activations. A device has one such thread, which drops what it had before it takes the next: so
    give it one, over no numbers.
    """
    leaf = torch.empty(0, device=device, requires_grad=True)
    torch.autograd.backward(leaf.neg(), leaf.detach(), inputs=leaf)
