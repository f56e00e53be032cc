"""Decides what counts as an out-of-memory error, from text alone.

To add a message, write a rule in `trainer_plugins/oom/rules.py` that says where its words come
from. `tests/oom/corpus.py` has the real text, and `tests/oom/detectors.txt` who recognises it.
"""

from trainer_plugins.oom.classify import OutOfMemory, classify, classify_anywhere
from trainer_plugins.oom.rules import Source

__all__ = ["OutOfMemory", "Source", "classify", "classify_anywhere"]
