"""Every private name of another library that the package uses is there, so a new release turns one line red."""

import ast
import importlib
import inspect
import re
from collections import defaultdict
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet

import trainer_plugins
from tests.private_names import WHERE

ROOT = Path(trainer_plugins.__file__).parent
_OURS = {
    *(
        "_",
        "_ids",
        "_device",
        "_full_eval",
        "_nvme_path",
        "_mb",
        "_multinode",
        "_load_optimizer_and",
        "_with_logits",
        "_save_optimizer",
        "_enable",
        "_disable",
    ),  # parts of names
    *(
        "_activations_on_the_host",
        "_generate_before_guards",
        "_memory_callbacks",
        "_trainer_plugins",
        "_was_inserted",
        "_streamed_by",
    ),  # what we leave with others
}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name.isidentifier()


@cache
def foreign_names() -> dict[str, set[str]]:
    """Private names that are read, imported or spelled out in a text, and defined nowhere in the package."""
    ours, used = set(_OURS), defaultdict(set)
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            line = f"{path.relative_to(ROOT.parent)}:{getattr(node, 'lineno', 0)}"
            names: list[str] = []
            match node:
                case ast.AnnAssign(target=ast.Name(id=name)) | ast.FunctionDef(name=name) if (
                    path.name == "hf_trainer.py"  # lists what a Trainer of transformers has
                ):
                    names = [name]
                case ast.Name() if path.name == "hf_trainer.py":
                    pass
                case ast.FunctionDef() | ast.ClassDef():
                    ours.add(node.name)
                case ast.Name(ctx=ast.Store()):
                    ours.add(node.id)
                case ast.Attribute(value=ast.Name(id="self"), ctx=ast.Store()):
                    ours.add(node.attr)
                case ast.Attribute():
                    names = [node.attr]
                case ast.Constant(value=str(text)):
                    names = [text]
                case ast.Import() | ast.ImportFrom():
                    module = getattr(node, "module", "") or ""
                    dotted = [f"{module}.{alias.name}" for alias in node.names]
                    names = [
                        part
                        for name in dotted
                        if "trainer_plugins" not in name
                        for part in name.split(".")
                    ]
            for name in filter(is_private, names):
                used[name].add(line)
    return {
        name: lines
        for name, lines in used.items()
        if name not in ours and not name.startswith("_Z")
    }


@cache
def owner_of(path: str) -> Any:
    """The module, or the class in a module, of that dotted path."""
    module, rest = path, list[str]()
    while True:
        try:
            found: Any = importlib.import_module(module)
        except ModuleNotFoundError:
            module, _, last = module.rpartition(".")
            if not module:
                return None
            rest.insert(0, last)
            continue
        for name in rest:
            found = getattr(found, name, None)
        return found


def has(path: str, name: str) -> bool:
    """Whether an owner has a name: as an attribute, or in its source, as what an instance gets is."""
    if "<" in path:
        library, _, bound = path.partition("<")
        return version(library) in SpecifierSet(f"<{bound}", prereleases=True)
    owner = owner_of(path)
    if owner is None or hasattr(owner, name):
        return owner is not None
    try:
        return re.search(rf"\b{name}\b", inspect.getsource(owner)) is not None
    except (OSError, TypeError):  # it is written in C++
        return False


@pytest.mark.parametrize("name", sorted(foreign_names()))
def test_the_name_is_known_and_there(name: str) -> None:
    used = ", ".join(sorted(foreign_names()[name]))
    assert name in WHERE, f"{used} uses {name}: say in tests/private_names.py where it is at home"
    assert any(has(path, name) for path in WHERE[name]), (
        f"{used} relies on {name}, which is gone from {WHERE[name]}"
    )


def test_what_is_no_longer_used_is_no_longer_listed() -> None:
    assert sorted(WHERE.keys() - foreign_names().keys()) == []
