"""What fits, what would help, and how near a plan was: runs that are planned many times."""
