"""These files divide batches of evaluation and of generation."""
