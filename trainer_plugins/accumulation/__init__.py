"""Accumulation: what more micro-batches of fewer rows do to the gradient of a step."""
