"""Gives memory back, on all ranks or on none."""
