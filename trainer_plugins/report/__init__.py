"""Render timelines and plans for people, as text and HTML."""
