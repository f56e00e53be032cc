"""Decides from text alone whether an error is an out-of-memory error.

To add a message, write a rule in `trainer_plugins/oom/rules.py` that cites the source of its words,
and make sure that `_HINTS` in `trainer_plugins/explain/text/excerpt.py` has one of them.
`tests/oom/corpus.py` has the real text, and `tests/oom/detectors.txt` lists who recognises it.
"""

from trainer_plugins.oom.classify import OutOfMemory, classify, classify_anywhere
from trainer_plugins.oom.rules import Source

__all__ = ["OutOfMemory", "Source", "classify", "classify_anywhere"]
