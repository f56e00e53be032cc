"""Finds how many rows to compute at once, and the measures to take if even one is too many."""
