"""Snapshots: a file that torch has written shows what held the memory of a card."""

from trainer_plugins.explain.snapshot.explained import compare_snapshots, explain_snapshot
from trainer_plugins.explain.snapshot.pickled import NotReadableError

__all__ = ["NotReadableError", "compare_snapshots", "explain_snapshot"]
