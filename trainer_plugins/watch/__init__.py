"""Judges the memory of a running run: one file per subject, each a pure function to findings.

To add a finding, write a pure function from readings to findings in the file of its subject, call
it in `trainer_plugins/watch/memory_watch.py`, and explain its code in `docs/findings.md`.
`tests/watch/test_judgements.py` has the cases.
"""
