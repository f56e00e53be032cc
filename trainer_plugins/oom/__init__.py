"""Decides what counts as an out-of-memory error, from text alone."""

from trainer_plugins.oom.classify import OutOfMemory, classify
from trainer_plugins.oom.rules import Source

__all__ = ["OutOfMemory", "Source", "classify"]
