"""A function is named by what it does, a property by what it is; a class name means one class."""

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "trainer_plugins"
NO_VERB = re.compile(
    r"_*(?!(?:em|s)?bed|(?:ex|pro|suc)?ceed|feed|need|seed|speed)(?:of|as|in|with|at|by|about|for|without|until|before"
    r"|after|what|why|whose|how|which|who|where|when|not|no|than|per|an?|the|its|[a-z]{3,}ed|said|told|ran|made|held"
    r"|grown|chosen|found|kept|known|given|taken|seen|left|drawn|shown|begun|sought|written)(?:_|$)"
)
PUBLIC = {"attached", "attached_callbacks", "released"}
"""Context managers, read as `with attached(...)`."""


@cache
def nodes() -> list[ast.AST]:
    return [
        node for path in PACKAGE.rglob("*.py") for node in ast.walk(ast.parse(path.read_text()))
    ]


def is_property(function: ast.FunctionDef) -> bool:
    return any(ast.unparse(each).endswith("property") for each in function.decorator_list)


def test_functions_are_named_by_verbs() -> None:
    functions = [
        node for node in nodes() if isinstance(node, ast.FunctionDef) and not is_property(node)
    ]
    odd = {each.name for each in functions if NO_VERB.match(each.name)}
    assert len(functions) > 2000
    assert odd - PUBLIC == set()


def test_a_class_name_means_one_class() -> None:
    names = Counter(node.name for node in nodes() if isinstance(node, ast.ClassDef))
    assert len(names) > 300
    assert [name for name, times in names.items() if times > 1] == []
