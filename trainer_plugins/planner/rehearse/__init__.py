"""The Trainer of a request is built, or received from the caller's process, and run on tensors without bytes."""
