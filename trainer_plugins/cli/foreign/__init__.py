"""Reads the flags, files and commands of other programs as options of `plan`."""
