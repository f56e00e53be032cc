"""Reads the snapshot of a card that torch has written: what held its memory, and when."""
