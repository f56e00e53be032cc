"""Build the Trainer of a request, or receive the user's, and run it on tensors without bytes."""
