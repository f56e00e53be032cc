"""Of what one launch or one subprocess tries for a whole module: what the selected tests ask for."""

from collections.abc import Iterable, Mapping
from typing import TypeVar

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
