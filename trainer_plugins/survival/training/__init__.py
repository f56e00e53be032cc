"""These files divide, replay and rehearse micro-batches of training."""
