"""Measures on a run's own rows that pieces add up, before a micro-batch is divided."""
