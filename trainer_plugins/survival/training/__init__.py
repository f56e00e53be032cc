"""Divides, replays and rehearses micro-batches of training."""
