"""run: the folder of a run becomes an `Explanation`, from what the run itself wrote.

`case.py` joins a record with its timeline, `causes.py` judges it, `remedies.py` says what to do.
`predicted.py` asks the planner what that would bring, `ending.py` finds out that a run was killed.
It imports no torch.
"""

from trainer_plugins.explain.run.explained import explain_record, explain_run

__all__ = ["explain_record", "explain_run"]
