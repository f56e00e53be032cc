"""Runs a computation that may fail, and undoes the effects of a failure."""
