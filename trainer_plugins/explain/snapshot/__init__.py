"""What the snapshot of a card says about an OOM: its cause, and what helps."""

from trainer_plugins.explain.snapshot.explained import compare_snapshots, explain_snapshot
from trainer_plugins.snapshot.pickled import NotReadableError

__all__ = ["NotReadableError", "compare_snapshots", "explain_snapshot"]
