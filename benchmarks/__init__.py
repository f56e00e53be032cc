"""Benchmarks behind the performance claims.

`scripts/bench` runs each of them alone and prints its figures.
"""
