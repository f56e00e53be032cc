"""Predict the memory of a run before you launch it: its request, its plan, changes that fit."""
