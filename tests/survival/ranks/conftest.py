"""The scripts here are launched by the tests beside them; they are no tests."""

collect_ignore = ["zero_plan.py", "fsdp2_ranks.py", "rehearsed_ranks.py"]
