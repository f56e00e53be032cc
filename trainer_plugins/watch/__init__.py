"""Judgement while a run goes on: one file a subject, each a pure function from values to findings."""

from trainer_plugins.watch.memory_watch import MemoryWatch
from trainer_plugins.watch.pressure import Budget

__all__ = ["Budget", "MemoryWatch"]
