"""Gets callbacks into one Trainer or every Trainer: by arguments, calls or a command."""
