"""Count the house from its own source: rooms, floors, imports, long files and functions.

A room is a module or a folder directly under `trainer_plugins/`, and each other folder of Python.
An arrow is a pair of rooms of which one imports the other, anywhere in its code. A room stands one
floor above the highest that it imports. Rooms in a circle have no floor, and an arrow between two
such rooms points upward for one of them. Circles of files are counted among imports that run at
import, and among all imports, including those inside functions.
"""

import ast
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "trainer_plugins"
OTHERS = ("benchmarks", "hydra_plugins", "scripts")

_FRAGMENTS = """
    about among and as at behind beside between but by for from how in inside like of on or that
    those to under what when where whether which who whom whose why with within without
"""
FRAGMENTS = frozenset(_FRAGMENTS.split())
"""A first word after which a docstring's first sentence has no subject; nouns go unnoticed."""


DOOR = Path("callbacks/_later.py")
"""It leads from callbacks to planner, check and explain; `tests/test_floors.py` checks that."""

START = Path("__main__.py")
"""It starts `cli`, and is no room of its own."""


@functools.cache
def trees() -> dict[Path, ast.Module]:
    """Return the syntax tree of each file of the package, by its path there."""
    return {
        path.relative_to(PACKAGE): ast.parse(path.read_text())
        for path in sorted(PACKAGE.rglob("*.py"))
    }


def imported(nodes: Iterator[ast.AST]) -> Iterator[list[str]]:
    """Yield the package's imported modules, as the parts of the name after `trainer_plugins`."""
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        for home, *name in (name.split(".") for name in names):
            if home == PACKAGE.name:
                yield name


def arrows_between(files: dict[Path, ast.Module], tower: str) -> dict[str, set[str]]:
    """Return the imports of each room of the package, or of one folder in it.

    Imports of the one door at call time do not count, and that of `python -m trainer_plugins`.

    Args:
        files: see `trees`.
        tower: the folder, "" for the whole package.
    """
    depth = 1 if tower else 0
    inside = {
        path: tree
        for path, tree in files.items()
        if path not in (DOOR, START) and (not tower or path.parts[0] == tower)
    }
    rooms = {path.parts[depth].removesuffix(".py") for path in inside}
    arrows: dict[str, set[str]] = {room: set() for room in rooms}
    for path, tree in inside.items():
        here = path.parts[depth].removesuffix(".py")
        for name in imported(ast.walk(tree)):
            if name[:depth] == [tower][:depth]:
                there = name[depth] if len(name) > depth and name[depth] in rooms else "__init__"
                arrows[here] |= {there} - {here}
    return arrows


def at_import(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that run at import: no function bodies, nothing only for type checkers."""
    for child in ast.iter_child_nodes(tree):
        is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        if not is_function and not _is_for_types(child):
            yield child
            yield from at_import(child)


def at_call_too(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield all nodes except those only for type checkers."""
    for child in ast.iter_child_nodes(tree):
        if not _is_for_types(child):
            yield child
            yield from at_call_too(child)


def _is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def floors(below: dict[str, set[str]]) -> dict[str, int]:
    """Return the floor of each room, counted from 1; rooms in a circle of imports get none."""
    found: dict[str, int] = {}
    while ready := [
        r for r in below if r not in found and all(other in found for other in below[r])
    ]:
        found.update(
            {room: 1 + max((found[other] for other in below[room]), default=0) for room in ready}
        )
    return found


def files_in_circles(files: dict[Path, ast.Module], *, at_call: bool = False) -> list[str]:
    """Return the files that import each other in a circle, at import or also inside functions.

    Imports only for type checkers do not count.
    """
    below = _imports(files, at_call_too if at_call else at_import)
    return sorted(name for name in below if name in _reached(name, below))


def come_along(files: dict[Path, ast.Module], room: str) -> set[str]:
    """Return the files that an import of a room, and of all files in it, brings along."""
    below = _imports(files, at_import)
    for name, found in below.items():  # the packages around a file are imported before it
        for each in (name, *found):
            found |= {each.rpartition(".")[0]} & below.keys()
    mine = {name for name in below if name.partition(".")[0] == room}
    return mine.union(*(_reached(name, below) for name in mine))


def lines_of(names: set[str]) -> int:
    """Return the total number of lines of these files."""
    paths = (PACKAGE / Path(*name.split(".")) for name in names)
    files = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py") for path in paths)
    return sum(len(file.read_text().splitlines()) for file in files)


def _imports(
    files: dict[Path, ast.Module], nodes_of: Callable[[ast.AST], Iterator[ast.AST]]
) -> dict[str, set[str]]:
    names = {".".join(path.with_suffix("").parts).removesuffix(".__init__"): path for path in files}
    return {
        name: {
            found
            for parts in _imported(files[path], nodes_of)
            if (found := _module(parts, names)) not in ("", name)
        }
        for name, path in names.items()
    }


@functools.cache
def _imported(
    tree: ast.Module, nodes_of: Callable[[ast.AST], Iterator[ast.AST]]
) -> list[list[str]]:
    return [*imported(nodes_of(tree))]


def _reached(start: str, below: dict[str, set[str]]) -> set[str]:
    """Return the files that a file imports, directly or through others."""
    found: set[str] = set()
    left = [*below[start]]
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            left.extend(below.get(name, ()))
    return found


def _module(parts: list[str], names: dict[str, Path]) -> str:
    dotted = ".".join(parts)
    return dotted if dotted in names else ".".join(parts[:-1])


def crowded_names(files: dict[Path, ast.Module]) -> list[str]:
    """Return the base names used in more than two folders; a traceback shows no more.

    Python itself requires two names, which are not our choice.
    """
    count = Counter(path.name for path in files)
    given = ("__init__.py", "__main__.py")
    return [name for name, number in count.items() if number > 2 and name not in given]


def is_long(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether a function has more than 60 lines, its docstring aside."""
    docstring = len((ast.get_docstring(function, clean=False) or "").splitlines())
    return (function.end_lineno or 0) - function.lineno + 1 - docstring > 60


def words_of_docs() -> int:
    """Return the number of words in the README and the pages of docs."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    return sum(len(page.read_text().split()) for page in pages)


def measure() -> dict[str, float]:
    """Return the figures, each a count unless its name says otherwise."""
    files = trees()
    arrows = arrows_between(files, "")
    floor = floors(arrows)
    upward = [
        (a, b) for a, others in arrows.items() for b in others if a not in floor and b not in floor
    ]

    lines = [line for path in files for line in (PACKAGE / path).read_text().splitlines()]
    lengths = {path: len((PACKAGE / path).read_text().splitlines()) for path in files}
    nodes = [node for tree in files.values() for node in ast.walk(tree)]
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    documented = [
        n
        for n in nodes
        if isinstance(n, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    docstrings = [text for text in map(ast.get_docstring, documented) if text]
    anys = sum(isinstance(node, ast.Name) and node.id == "Any" for node in nodes)
    return {
        "rooms at the top": len(arrows) + len(OTHERS),
        "floors": max(floor.values()),
        "arrows": sum(map(len, arrows.values())),
        "arrows in a circle of rooms": len(upward),
        "files in circles at import": len(files_in_circles(files)),
        "files in circles at call time": len(files_in_circles(files, at_call=True)),
        "files": len(files),
        "lines": len(lines),
        "lines that callbacks import": lines_of(come_along(files, "callbacks")),
        "base names in more than two folders": len(crowded_names(files)),
        "files over 400 lines": sum(length > 400 for length in lengths.values()),
        "functions": len(functions),
        "functions over 60 lines, docstring aside": sum(map(is_long, functions)),
        "Any per 1000 lines": 1000 * anys / len(lines),
        "lines over 100 columns": sum(len(line) > 100 for line in lines),
        "docstrings": len(docstrings),
        "docstrings that begin with a fragment": sum(
            text.split()[0].strip("`,.:").lower() in FRAGMENTS for text in docstrings
        ),
    }


if __name__ == "__main__":
    for name, value in measure().items():
        print(f"{name}: {value:.1f}".removesuffix(".0"))
    print(f"words of docs and README: {words_of_docs()}")
