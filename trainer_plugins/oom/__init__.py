"""Decides what counts as an out-of-memory error, from text alone."""

from trainer_plugins.oom.classify import OutOfMemory, classify, classify_anywhere
from trainer_plugins.oom.rules import Source

__all__ = ["OutOfMemory", "Source", "classify", "classify_anywhere"]
