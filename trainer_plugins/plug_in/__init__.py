"""These are the ways into a Trainer: arguments, one Trainer, every Trainer, a command."""
