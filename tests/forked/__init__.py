"""Scripts and commands of tests are forked from a server that has imported torch and transformers.

`relay.py` makes a program that stands for Python, `shim.py`, and takes its calls to a server, which
has imported `preloaded.py`. In each fork `as_python.py` does what Python would.
"""

from pathlib import Path

ROOT = str(Path(__file__).parent.parent.parent)

MARK = "STARTED_BY_A_TEST"
"""The variable by which `processes` finds what a test has started; a fork is also named by it."""

SHIM = "FORKED_PYTHON"
"""The variable that names the program which stands for Python."""

TELL_TO = "READ_BY_IMPORTS"
"""The variable that names the file in which the server lists what its imports read."""
