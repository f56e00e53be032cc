"""Benchmarks that the performance claims rest on.

`scripts/bench` runs each of them alone and prints its figures.
"""
