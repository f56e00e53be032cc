"""The house stands: each floor imports only from the floors beneath it, and the light rooms stay light."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import trainer_plugins

ROOT = Path(trainer_plugins.__file__).parent
FLOORS = [
    {
        *("units", "printable", "regular_file", "finding", "reading", "strategy", "thinning", "timeline", "history"),
        *("metrics", "prometheus", "as_main"),
    },
    {"devices", "agreement", "allocator", "launch"},
    {"watch", "oom", "generation", "holders", "release", "planner"},
    {"callbacks", "report", "survival"},
    {
        *("presets", "options", "protection", "attachment", "flags", "run", "integrations", "_site"),
        *("cli", "testing", "__init__", "__main__"),
    },
]
# Rooms of one floor that may look at a neighbour, each with its reason.
NEIGHBOURS = {
    ("finding", "printable"),
    ("strategy", "printable"),
    ("thinning", "regular_file"),
    ("timeline", "printable"),
    ("timeline", "regular_file"),
    ("timeline", "thinning"),
    ("history", "printable"),
    ("history", "timeline"),
    ("prometheus", "printable"),
    ("prometheus", "regular_file"),
    ("timeline", "finding"),
    ("timeline", "reading"),
    ("timeline", "strategy"),
    ("strategy", "units"),
    ("metrics", "reading"),
    ("metrics", "timeline"),
    ("metrics", "units"),
    ("prometheus", "metrics"),
    ("release", "watch"),  # a release holds by the same tolerance by which the watch tells foreign memory
    ("cli", "__init__"),  # the version
    ("launch", "allocator"),  # its settings are part of the environment of a launch
    ("launch", "__init__"),  # where the package is, for the files it carries
    ("__main__", "cli"),
    ("__init__", "callbacks"),
    ("__init__", "generation"),
    ("__init__", "planner"),
    # How the pack gets into a Trainer, a stair of its own: each step stands on those before it.
    ("options", "presets"),
    ("protection", "options"),
    ("attachment", "options"),
    ("attachment", "protection"),
    ("attachment", "_site"),  # what calls back on an import is read at every start of Python, and imports nothing
    ("_site", "attachment"),  # only when the Trainer has been imported
    ("flags", "presets"),  # the nearest name
    ("flags", "options"),
    ("run", "flags"),
    ("run", "attachment"),
    ("cli", "flags"),
    ("cli", "_site"),  # where it is
    ("integrations", "options"),
    ("integrations", "protection"),
    ("integrations", "attachment"),
    ("integrations", "__init__"),  # where the package is
    ("__init__", "options"),
    ("__init__", "protection"),
    ("__init__", "attachment"),
    ("__init__", "survival"),
    ("survival", "callbacks"),  # its memo is a callback of the run like the others
}


def floor_of(part: str) -> int:
    (floor,) = (number for number, floor in enumerate(FLOORS) if part in floor)
    return floor


def imports_of(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    names = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    names += [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    parts = [name.split(".") for name in names if name.split(".")[0] == "trainer_plugins"]
    return {part[1] if len(part) > 1 else "__init__" for part in parts}


def test_no_import_climbs_or_goes_sideways() -> None:
    seen, wrong = 0, []
    for path in ROOT.rglob("*.py"):
        part = path.relative_to(ROOT).parts[0].removesuffix(".py")
        for other in imports_of(path) - {part}:
            seen += 1
            if floor_of(other) >= floor_of(part) and (part, other) not in NEIGHBOURS:
                wrong.append(f"{path.relative_to(ROOT)} imports {other}")
    assert seen > 40
    assert not wrong


@pytest.mark.parametrize(
    "module",
    [
        "timeline",
        "history",
        "prometheus",
        "report.text",
        "cli",
        "oom",
        "allocator.settings",
        "allocator.model",
        "planner",
        "launch.environment",
        "launch.configs",
        "launch.lint",
        "attachment",
        "run",
        "options",
        "testing.simgpu",
        "testing.nvml",
        "testing.card",
    ],
)
def test_what_should_be_light_imports_neither_torch_nor_transformers(module: str) -> None:
    code = f"import sys, trainer_plugins.{module}; sys.exit(bool({{'torch', 'transformers'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
