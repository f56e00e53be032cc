"""run: the folder of a run becomes an `Explanation`, from what the run itself wrote."""

from trainer_plugins.explain.run.explained import explain_record, explain_run

__all__ = ["explain_record", "explain_run"]
