"""Plugins for programs with a plugin interface of their own, one a file."""
