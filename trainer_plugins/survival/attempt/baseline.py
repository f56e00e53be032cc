"""Baseline: tell whether the memory of a failed attempt came back, and if not, who holds it."""

import logging
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn

from trainer_plugins.devices import Device, open_device
from trainer_plugins.finding import Finding, Severity
from trainer_plugins.reading import MemoryReading
from trainer_plugins.units import size
from trainer_plugins.upkeep.holders import GROWTH_FRACTION, graphs_held, tensors_held

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Card:
    """Wraps a device so that it never ends a training: after its first error it is left alone."""

    def __init__(self, device: Device) -> None:
        self._device, self._has_failed = device, False

    def read(self) -> MemoryReading | None:
        """Read the memory; None after a question that failed."""
        return self._ask(self._device.read)

    def reset_peak(self) -> None:
        """Begin a new interval for peaks."""
        self._ask(self._device.reset_peak)

    def release_cached(self) -> None:
        """Give cached memory back to the device."""
        self._ask(self._device.release_cached)

    def _ask(self, question: Callable[[], T]) -> T | None:
        if self._has_failed:
            return None
        try:
            return question()
        except Exception as error:  # noqa: BLE001 - a monitor's error is none of training's
            self._has_failed = True
            logger.warning(
                "survive_oom no longer reads the memory of %s: %s: %s. Training goes on, and "
                "nothing more is rehearsed",
                *(self._device.name, type(error).__name__, error),
            )
            return None


def card_of(device: torch.device) -> Card | None:
    """Open the card of a run.

    It is None for main memory, which other processes use too, and if torch counts no memory there.
    """
    if device.type == "cpu":
        return None
    try:
        return Card(open_device(device))
    # a ValueError if torch counts nothing, and whatever a driver raises
    except Exception:  # noqa: BLE001
        return None


def leftover(
    card: Card, expected_bytes: int, model: nn.Module, optimizer: torch.optim.Optimizer
) -> Finding | None:
    """Report memory that a failed attempt left alive, with its holders; None if there is none.

    It costs a reading, and a walk through all objects if something is left.

    Args:
        card: the card of the run.
        expected_bytes: what may be allocated.
        model: holds tensors of its own.
        optimizer: holds tensors of its own.
    """
    reading = card.read()
    if reading is None:
        return None
    left_bytes = reading.allocated_bytes - expected_bytes
    if left_bytes < GROWTH_FRACTION * reading.total_bytes:
        return None
    kind = reading.device.split(":")[0]
    held = [
        f"a graph that ends in {list(end.shape)}, held by {end.holder}" for end in graphs_held(kind)
    ]
    held = held or [
        f"{list(t.shape)} held by {t.holder}" for t in tensors_held(kind, model, optimizer)
    ]
    return Finding(
        code="out-of-memory-leftover",
        severity=Severity.WARNING,
        summary=f"{size(left_bytes)} of an attempt that did not fit are still alive on "
        f"{reading.device}",
        evidence="; ".join(held) or "no holder",
        remedy="Keep numbers there, not tensors: .item(), or .detach().cpu(). The retry lacks the "
        "memory that is held.",
        amount=float(left_bytes),
    )
