"""Attempt: runs work that may not fit on the card, and frees all memory of a failed try."""

import gc
import logging
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from time import perf_counter
from typing import NamedTuple, TypeVar

import torch

from trainer_plugins.devices.accelerator import AcceleratorDevice, open_device
from trainer_plugins.finding import Finding
from trainer_plugins.oom import classify
from trainer_plugins.reading import MemoryReading
from trainer_plugins.units import size
from trainer_plugins.upkeep.holders import GROWTH_FRACTION, graphs_held, tensors_held

T = TypeVar("T")

logger = logging.getLogger(__name__)

_NUM_FRAMES = 8


class DidNotFit(NamedTuple):
    """The words of an attempt's error. The error itself would keep frames and activations alive."""

    words: str
    is_certain: bool  # it names memory; on a full card cuBLAS reports other errors
    where: str  # the last frames of the traceback, as text
    seconds: float
    is_here: bool = True  # it failed on this rank

    @property
    def first_line(self) -> str:
        """Return the error's first line, without torch's advice for the whole process."""
        line = self.words.strip().partition("\n")[0]
        return line.partition(" Including non-PyTorch")[0].rstrip(".")[:300]

    def make_error(self, why_not: str) -> Exception:
        kind = torch.OutOfMemoryError if self.is_certain else RuntimeError
        return kind(
            f"{self.words}\nsurvive_oom could not help: {why_not}\n"
            f"It failed first in:\n{self.where}"
        )


DID_NOT_FIT_ELSEWHERE = DidNotFit("another rank ran out of memory", True, "", 0.0, is_here=False)


def attempt(work: Callable[[], T], device: torch.device | None = None) -> T | DidNotFit:
    """Run work. If it does not fit, all memory of its frames is free on return."""
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
        where = "".join(traceback.format_tb(error.__traceback__)[-_NUM_FRAMES:])
        failure = DidNotFit(str(error), found.is_certain, where, perf_counter() - started)
        link: BaseException | None = error
        while link is not None:
            traceback.clear_frames(link.__traceback__)
            link = link.__context__
    # Reference counting does not free a graph with a cycle, such as checkpointing's.
    gc.collect()
    # On the CPU the backward pass runs in the calling thread.
    if device is not None and device.type != "cpu":
        _wait_for_backward_thread(device)
    return failure


def _wait_for_backward_thread(device: torch.device) -> None:
    """Wait until autograd's thread for this device has dropped the graph of a failed pass."""
    # The error arrives earlier. The device's only thread drops a graph before it takes the next.
    leaf = torch.empty(0, device=device, requires_grad=True)
    torch.autograd.backward(leaf.neg(), leaf.detach(), inputs=leaf)


@contextmanager
def collect_once() -> Iterator[None]:
    """Make each further failed attempt in this block collect only garbage made since."""
    # A scan of all imported objects takes 0.04 to 1 s, and a failed attempt just did one. If other
    # code froze many objects, collections are short, and unfreezing is not up to us.
    if gc.get_freeze_count() > _MOST_FROZEN:
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


_MOST_FROZEN = 1000  # Python 3.12 starts with 375


class CardReader:
    """Reads a device until its first error, which must not end training. It may have no device."""

    def __init__(self, device: AcceleratorDevice | None) -> None:
        self._device, self.name = device, device.name if device is not None else ""

    def read(self) -> MemoryReading | None:
        """Read the memory; None if nothing counts it, or after the first error."""
        return self._ask(lambda device: device.read())

    def read_allocated_bytes(self) -> int:
        """Return the bytes of live tensors; 0 where `read` returns None."""
        return self._ask(lambda device: device.read_allocated_bytes()) or 0

    def reset_peak(self) -> None:
        self._ask(lambda device: device.reset_peak())

    def release_cached(self) -> None:
        self._ask(lambda device: device.release_cached())

    def _ask(self, question: Callable[[AcceleratorDevice], T]) -> T | None:
        if self._device is None:
            return None
        try:
            return question(self._device)
        except Exception as error:  # noqa: BLE001 - a monitor's error must not end the training
            self._device = None
            logger.warning(
                "survive_oom no longer reads the memory of %s: %s: %s. Training continues,"
                " without further rehearsals",
                self.name,
                type(error).__name__,
                error,
            )
            return None


def card_of(device: torch.device) -> CardReader:
    """Open the card of a run; never read main memory, or devices that torch does not count."""
    card = None
    with suppress(Exception):  # a ValueError if torch counts nothing, or any error of a driver
        card = open_device(device)
    return CardReader(card if isinstance(card, AcceleratorDevice) else None)


def judge_left_over(card: CardReader, expected_bytes: int) -> Finding | None:
    """Report memory that a failed attempt left allocated, if it is much, with its holders."""
    reading = card.read()
    left_bytes = reading.allocated_bytes - expected_bytes if reading is not None else 0
    if reading is None or left_bytes < GROWTH_FRACTION * reading.total_bytes:
        return None
    kind = card.name.partition(":")[0]
    graphs = graphs_held(kind)
    held = [f"a graph that ends in {list(end.shape)}, held by {end.holder}" for end in graphs]
    if not held:
        held = [f"{list(each.shape)} held by {each.holder}" for each in tensors_held(kind)]
    return Finding.warning(
        code="out-of-memory-leftover",
        summary=f"a failed attempt left {size(left_bytes)} allocated on {card.name}",
        evidence="; ".join(held) or "no holder found",
        remedy="Store numbers there, not tensors: .item(), or .detach().cpu(). The retry lacks "
        "this memory.",
        amount=float(left_bytes),
    )
