"""Simulate a card that is not there: what torch would find, choose and compute on it."""
