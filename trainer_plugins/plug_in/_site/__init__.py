"""A folder that `trainer-plugins exec` puts first on PYTHONPATH.

Every Python that starts under it reads this folder.
"""
