"""The frozen base of a run waits in main memory, and is on the card a few layers at a time."""
