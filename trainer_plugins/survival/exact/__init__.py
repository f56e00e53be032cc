"""These files decide which batches, losses and models add up over pieces."""
