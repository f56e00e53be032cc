"""These files find how many rows are computed at once, and what to switch on if one is too many."""
