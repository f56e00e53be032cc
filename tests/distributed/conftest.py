"""The scripts here are launched by the tests beside them; they are no tests."""

collect_ignore = [
    "two_ranks.py",
    "fsdp_on_cpu.py",
    "guarded.py",
    "own_accelerator.py",
    "fsdp_1.py",
    "refused.py",
]
