"""Runs inside a program on the dry card: values, placeholder weights, safety.

_site/sitecustomize.py calls `start` when the program imports torch.
"""
