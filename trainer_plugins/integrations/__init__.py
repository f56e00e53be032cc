"""Plugins for programs with a plugin interface of their own, one a file.

To add a program, write its plugin in a file of this folder, its part of `docs/clients.md`, and its
test in `tests/clients/`.
"""
