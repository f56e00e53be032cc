"""Baseline: whether the memory of a failed attempt came back, and if not, who holds it."""

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
    """A card that never ends a training: what it fails to answer is said, and nothing more is asked of it."""

    def __init__(self, device: Device) -> None:
        self._device, self._has_failed = device, False

    def read(self) -> MemoryReading | None:
        """Look once; None from the first time on that it failed, whatever with."""
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
                "survive_oom reads the memory of %s no more: %s: %s. Training goes on, and nothing more is rehearsed",
                *(self._device.name, type(error).__name__, error),
            )
            return None


def card_of(device: torch.device) -> Card | None:
    """The card of a run.

    None for main memory, which moves with everything, and where torch counts nothing.
    """
    if device.type == "cpu":
        return None
    try:
        return Card(open_device(device))
    # a ValueError where torch counts nothing, and whatever a driver says
    except Exception:  # noqa: BLE001
        return None


def leftover(
    card: Card, expected_bytes: int, model: nn.Module, optimizer: torch.optim.Optimizer
) -> Finding | None:
    """What an attempt that failed left alive, beyond what may be (`expected_bytes`), with its holders.

    Costs a reading, and a walk through all objects where something is left.
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
        summary=f"{size(left_bytes)} of an attempt that did not fit are still alive on {reading.device}",
        evidence="; ".join(held) or "no holder",
        remedy="Keep numbers there, not tensors: .item(), or .detach().cpu(). What is held is missing for the retry.",
        amount=float(left_bytes),
    )
