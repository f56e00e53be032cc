"""The script here is launched by the test beside it; it is no test."""

collect_ignore = ["two_ranks.py"]
