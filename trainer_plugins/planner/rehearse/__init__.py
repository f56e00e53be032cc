"""Build the Trainer of a request, or restore the user's, for a dry run."""
