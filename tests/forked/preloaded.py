"""Imports what most scripts of tests need, and tells which variables those imports read."""

import contextlib
import importlib
import json
import os
import sys
from pathlib import Path

from tests.forked import TELL_TO

IMPORTS = ("transformers.trainer", "trl", "peft", "trainer_plugins.as_main")
_OF_ENVIRON = ("<frozen ", os.__file__)
_LOOK_AT_ALL = ("/tqdm/utils.py", "/fsspec/config.py")
"""Files that go through all variables to find their own."""


def _watch(read: set[str], name: str):
    found = getattr(type(os.environ), name)

    def watch(self, key):
        caller = sys._getframe(1)
        while caller.f_code.co_filename.startswith(_OF_ENVIRON):
            assert caller.f_back is not None
            caller = caller.f_back
        if not caller.f_code.co_filename.endswith(_LOOK_AT_ALL):
            read.add(key)
        return found(self, key)

    setattr(type(os.environ), name, watch)
    return found


def _import() -> None:
    read: set[str] = set()
    names = ("__getitem__", "__contains__")
    found = [_watch(read, name) for name in names]
    try:
        for module in IMPORTS:
            with contextlib.suppress(ImportError):
                importlib.import_module(module)
    finally:
        for name, method in zip(names, found, strict=True):
            setattr(type(os.environ), name, method)
    Path(os.environ[TELL_TO]).write_text(json.dumps(sorted(read)))


_import()
