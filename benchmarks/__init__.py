"""What the performance claims rest on.

`scripts/bench` runs each benchmark alone and prints its figures.
"""
