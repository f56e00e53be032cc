"""These files say how many rows are computed at once, and what is switched on when one is too many."""
