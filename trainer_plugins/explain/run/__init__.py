"""run: the folder of a run becomes an `Explanation`, from what the run itself wrote.

To add a cause, judge it in `trainer_plugins/explain/run/causes.py`, name its remedies in
`trainer_plugins/advice/for_causes.py`, and count their numbers in
`trainer_plugins/explain/run/remedies.py`. `tests/explain/test_planted.py` plants a run that shows
it.
"""

from trainer_plugins.explain.run.explained import explain_record, explain_run

__all__ = ["explain_record", "explain_run"]
