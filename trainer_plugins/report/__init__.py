"""What a run's timelines say, for people."""
