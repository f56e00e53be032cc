"""Writes a run's timeline, thins it, reads it again and exports it."""
