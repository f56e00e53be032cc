"""What the performance claims rest on. `scripts/bench` runs each file alone and prints ratios."""
