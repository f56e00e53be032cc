"""These files try a computation, and undo what it left when it failed."""
