"""Writes a run's timeline, thins it, reads it back and exports it."""
