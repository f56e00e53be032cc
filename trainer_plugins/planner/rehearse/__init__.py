"""Build the Trainer of a request, or receive the user's, for the dry card to train."""
