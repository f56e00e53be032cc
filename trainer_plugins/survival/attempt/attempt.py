"""Attempt: run work that may not fit, and keep words, not an exception that holds the memory."""

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
    """Holds what the error of an attempt said, and how long the attempt took; but no tensor."""

    def __init__(self, error: BaseException, found: OutOfMemory, seconds: float) -> None:
        self.words = str(error)
        self.is_certain = found.is_certain
        """Whether it says that memory ran out: on a full card cuBLAS, for one, says otherwise."""
        self.where = "".join(traceback.format_tb(error.__traceback__)[-_NUM_FRAMES:])
        """The last frames of the traceback, as text."""
        self.seconds = seconds

    @property
    def first_line(self) -> str:
        return self.words.strip().partition("\n")[0][:300]

    def as_error(self, why_not: str) -> Exception:
        """Return the error once more, with the reason why it cannot be survived."""
        kind = torch.OutOfMemoryError if self.is_certain else RuntimeError
        return kind(
            f"{self.words}\nsurvive_oom could not help: {why_not}\n"
            f"It failed first in:\n{self.where}"
        )


class DidNotFitElsewhere(DidNotFit):
    """Stands for an attempt that fitted on this rank, and did not on another."""

    def __init__(self) -> None:
        self.words, self.is_certain = "another rank ran out of memory", True
        self.where, self.seconds = "", 0.0


def attempt(
    work: Callable[[], T],
    release: Callable[[], object] | None = None,
    device: torch.device | None = None,
) -> T | DidNotFit:
    """Run work; if it does not fit, all that its frames held is free when this returns.

    An exception keeps its traceback, that keeps the frames, and those keep the activations. So the
    words are kept, the frames are cleared, and nothing is retried before the `except` block is
    left, where Python drops the exception.

    Args:
        work: what is tried.
        release: called after a failure, to let go of what frames above this one hold.
        device: the device of its backward pass, if it has one.
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
    # On the CPU a backward pass runs in the thread that calls.
    if device is not None and device.type != "cpu":
        _wait_for_backward_thread(device)
    return failure


def _wait_for_backward_thread(device: torch.device) -> None:
    """Wait until autograd's thread of this device has dropped the graph of a pass that failed.

    The error reaches us first: in two of three failures the thread still held the last layer's
    activations. A device has one such thread, which drops its graph before it takes the next one.
    So it gets one over no numbers.
    """
    leaf = torch.empty(0, device=device, requires_grad=True)
    torch.autograd.backward(leaf.neg(), leaf.detach(), inputs=leaf)
