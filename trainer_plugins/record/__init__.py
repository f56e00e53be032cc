"""A run's timeline, as it is written, thinned, read again and exported."""
