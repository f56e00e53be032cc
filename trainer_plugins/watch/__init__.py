"""Judges a running run's memory: one file a subject, each a pure function to findings."""
