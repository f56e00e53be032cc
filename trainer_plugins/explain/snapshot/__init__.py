"""Snapshots: a file that torch has written shows what held the memory of a card.

A file of `torch.cuda.memory._dump_snapshot` is read by `pickled.py` and `cards.py`, brought back
to its first event by `trace.py`, repeated by `replay.py`, sorted into categories by `stacks.py`,
`lives.py` and `held.py`, and judged by `causes.py` and `remedies.py`.
"""

from trainer_plugins.explain.snapshot.explained import compare_snapshots, explain_snapshot
from trainer_plugins.explain.snapshot.pickled import NotReadableError

__all__ = ["NotReadableError", "compare_snapshots", "explain_snapshot"]
