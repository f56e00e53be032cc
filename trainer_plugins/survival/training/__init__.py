"""A micro-batch of training is divided, replayed or rehearsed here."""
