"""Of what one launch or one subprocess tries for a whole module: what the selected tests ask for."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import pytest

T = TypeVar("T")


def wanted(
    request: pytest.FixtureRequest, cases: Mapping[str, T], also: Iterable[str] = ()
) -> dict[str, T]:
    """Return the cases that are a parameter of a selected test of this module, and some others."""
    names = {
        value
        for item in request.session.items
        if item.path == request.path and hasattr(item, "callspec")
        for value in item.callspec.params.values()
        if isinstance(value, str)
    }
    return {name: case for name, case in cases.items() if name in {*names, *also}}


def write_wanted(folder: Path, names: Iterable[object]) -> None:
    """Leave the names of cases for the script that runs them."""
    (folder / "wanted.json").write_text(json.dumps([*names]))


def read_wanted(folder: Path) -> list[Any]:
    """Return the names that a test left."""
    return json.loads((folder / "wanted.json").read_text())
