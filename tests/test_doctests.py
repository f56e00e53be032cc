"""The examples in docstrings say what happens."""

import doctest
import importlib
from pathlib import Path

import pytest

import trainer_plugins

ROOT = Path(trainer_plugins.__file__).parent
FILES = [
    path.relative_to(ROOT.parent)
    for path in sorted(ROOT.rglob("*.py"))
    if ">>> " in path.read_text()
]
MODULES = [".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in FILES]


@pytest.mark.parametrize("name", MODULES)
def test_an_example_in_a_docstring(name: str) -> None:
    done = doctest.testmod(importlib.import_module(name))
    assert (done.failed, done.attempted > 0) == (0, True)
