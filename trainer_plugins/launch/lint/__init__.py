"""Judges an accelerate YAML or a DeepSpeed JSON before the launch, and imports neither library."""
