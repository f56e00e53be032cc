"""explain: why a run ran out of memory, and what would have made it fit.

A raw log, a memory snapshot of torch or the record of a run becomes an `Explanation`, without torch
and in less than a second; only the planner, which predicts what remedies bring, is slower.
"""
