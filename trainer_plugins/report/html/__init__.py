"""Renders runs, plans and snapshots as pages: each is one file that loads nothing."""
