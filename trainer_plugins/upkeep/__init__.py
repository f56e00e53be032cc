"""Frees memory, on all ranks or on none."""
