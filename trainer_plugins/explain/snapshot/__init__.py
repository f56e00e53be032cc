"""Explain an OOM from the snapshot of a card: its cause, and remedies.

To add a cause, judge it in `trainer_plugins/explain/snapshot/causes.py`; the replayed changes are
in `trainer_plugins/explain/snapshot/remedies.py`, and the frames of a library in
`trainer_plugins/snapshot/stacks.py`. `tests/explain/test_snapshot.py` has its story, and
`docs/explain.md` its page.
"""

from trainer_plugins.explain.snapshot.explained import compare_snapshots, explain_snapshot
from trainer_plugins.snapshot.pickled import NotReadableError

__all__ = ["NotReadableError", "compare_snapshots", "explain_snapshot"]
