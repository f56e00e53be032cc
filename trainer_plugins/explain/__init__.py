"""explain: a log, a snapshot or a run's record says why it ran out of memory, without torch."""
