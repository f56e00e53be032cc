"""Turn the folder of a run into an `Explanation`, from files that the run itself wrote.

The causes are judged in `trainer_plugins/explain/judges.py`, by the facts that
`trainer_plugins/explain/run/fill_facts.py` reads; the numbers of remedies are computed in
`trainer_plugins/explain/run/remedies.py`.
"""

from trainer_plugins.explain.run.explained import explain_record, explain_run

__all__ = ["explain_record", "explain_run"]
