"""Dry runs: the user's own command at full size, on CUDA's own code, without a card.

`card/` has the libraries that stand where CUDA's would, `inside/` what runs in the program, and
`dry_plan.py` makes a MemoryPlan of it.
"""
