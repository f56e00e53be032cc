"""Explain why a run ran out of memory, from a log, a snapshot or its record, without torch."""
