"""A run's own rows are measured in pieces here, before a micro-batch of it is divided."""
