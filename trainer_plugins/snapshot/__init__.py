"""Read torch's memory snapshot of a card: the use of its memory over time."""
