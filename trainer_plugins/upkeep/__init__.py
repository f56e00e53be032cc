"""Memory is given back here, on all ranks or on none."""
