"""These files say which batches, losses and models add up over pieces."""
