"""Runs inside a program on the dry card: values, weights that are not there, safety.

`start` is called when the program imports torch (_site/sitecustomize.py).
"""
