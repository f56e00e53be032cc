"""Keeps the frozen base of a run in main memory, with a few layers at a time on the card."""
