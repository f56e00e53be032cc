"""A folder that `trainer-plugins exec` puts first on PYTHONPATH.

Read at each start of Python under it.
"""
