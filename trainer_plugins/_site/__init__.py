"""A folder that `trainer-plugins exec` puts first on PYTHONPATH; every Python under it reads it."""
