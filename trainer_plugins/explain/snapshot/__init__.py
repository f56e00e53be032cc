"""Explain an OOM from the snapshot of a card: its cause, and remedies.

The causes are judged in `trainer_plugins/explain/judges.py`, by the facts that
`trainer_plugins/explain/snapshot/fill_facts.py` reads. The replayed changes are in
`trainer_plugins/explain/snapshot/remedies.py`, and the frames of a library in
`trainer_plugins/snapshot/stacks.py`.
"""

from trainer_plugins.explain.snapshot.explained import compare_snapshots, explain_snapshot
from trainer_plugins.snapshot.pickled import NotReadableError

__all__ = ["NotReadableError", "compare_snapshots", "explain_snapshot"]
