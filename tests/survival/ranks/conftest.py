"""The scripts here are launched by the tests beside them; they are no tests."""

collect_ignore = [
    "every_trainer.py",
    "fsdp_ranks.py",
    "random_failures.py",
    "zero_plan.py",
]
