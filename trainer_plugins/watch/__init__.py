"""Judges a running run's memory: one file a subject, each a pure function to findings."""

from trainer_plugins.watch.memory_watch import MemoryWatch
from trainer_plugins.watch.pressure import Budget

__all__ = ["Budget", "MemoryWatch"]
