"""Runs inside a program on the dry card: values, weights that are not there, safety.

`start` is called when the program imports torch (plug_in/_site/sitecustomize.py).
"""
