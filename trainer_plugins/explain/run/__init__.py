"""Turn the folder of a run into an `Explanation`, from files that the run itself wrote.

To add a cause, judge it in `trainer_plugins/explain/run/causes.py`, name its remedies in
`trainer_plugins/advice/for_causes.py`, and compute their numbers in
`trainer_plugins/explain/run/remedies.py`. `tests/explain/test_planted.py` plants a run that shows
it.
"""

from trainer_plugins.explain.run.explained import explain_record, explain_run

__all__ = ["explain_record", "explain_run"]
