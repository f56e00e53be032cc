"""explain: why a run ran out of memory, and what would have made it fit.

A raw log, a memory snapshot of torch or the record of a run becomes an `Explanation`. That
needs no torch, so an answer takes less than a second; only the planner, which predicts what the
remedies of a run would bring, is a process with torch.
"""
