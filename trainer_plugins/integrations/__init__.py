"""Plugins for programs that have their own plugin interface, one per file.

To add a program, write its plugin in a file of this folder, its part of `docs/clients.md`, and its
test in `tests/clients/`.
"""
