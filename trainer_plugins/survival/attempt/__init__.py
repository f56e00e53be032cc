"""These files try a computation, and take back what it left when it fails."""
