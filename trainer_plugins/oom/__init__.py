"""Decides what counts as an out-of-memory error, in one place and from text alone."""

from trainer_plugins.oom.classify import OutOfMemory, classify
from trainer_plugins.oom.rules import Source

__all__ = ["OutOfMemory", "Source", "classify"]
