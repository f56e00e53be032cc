"""Predict the memory of a run before its launch: what is asked, what is answered, what fits."""
