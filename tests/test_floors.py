"""The house stands as docs/internals/architecture.md draws it: imports point down, and the light rooms stay light."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.house import DOOR, arrows_between, come_along, files_in_circles, lines_of, trees

ROOT = Path(__file__).parent.parent
PICTURE = re.compile(r"^(trainer_plugins|planner|survival): ?.*\n\n((?: {4}.*\n)+)", re.MULTILINE)


def pictures() -> dict[str, dict[str, int]]:
    """For the whole and for each tower in it: the floor of each room."""
    drawn: dict[str, dict[str, int]] = {}
    for name, lines in PICTURE.findall(
        (ROOT / "docs" / "internals" / "architecture.md").read_text()
    ):
        floor, floors = 0, {}
        for line in lines.splitlines():
            number, rooms = line[:8].strip(), line[8:]
            floor = int(number) if number else floor
            alone, _, words = rooms.partition("   ")
            floors.update(dict.fromkeys([alone.strip()] if words else rooms.split(), floor))
        drawn["" if name == "trainer_plugins" else name] = floors
    return drawn


@pytest.mark.parametrize("tower", ["", "planner", "survival"])
def test_the_picture_shows_every_room_and_no_other(tower: str) -> None:
    folder = ROOT / "trainer_plugins" / tower
    there = {path.stem for path in folder.glob("*.py")} | {
        path.parent.name for path in folder.glob("*/__init__.py")
    }
    assert set(pictures()[tower]) == there - {"configs", "__main__"}


@pytest.mark.parametrize(("tower", "num_arrows"), [("", 70), ("planner", 20), ("survival", 55)])
def test_every_import_points_down(tower: str, num_arrows: int) -> None:
    floor = pictures()[tower]
    arrows = arrows_between(trees(), tower)
    climbing = [
        f"{a} imports {b}" for a, others in arrows.items() for b in others if floor[b] >= floor[a]
    ]
    assert not climbing
    assert sum(map(len, arrows.values())) >= num_arrows


def test_an_import_is_seen_wherever_it_stands() -> None:
    code = """
import trainer_plugins.units as u
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from trainer_plugins.oom import classify
def late():
    from trainer_plugins import cli
"""
    files = {**trees(), Path("devices/probe.py"): ast.parse(code)}
    assert arrows_between(files, "")["devices"] >= {"units", "oom", "cli"}


def test_no_files_import_each_other_in_a_circle_not_even_inside_functions() -> None:
    assert files_in_circles(trees(), at_call=True) == []
    late = "def late():\n    from trainer_plugins.devices import probe"
    files = {
        **trees(),
        Path("devices/probe.py"): ast.parse("from trainer_plugins import units"),
        Path("units.py"): ast.parse(late),
    }
    assert files_in_circles(files) == []
    assert files_in_circles(files, at_call=True) == ["devices.probe", "units"]


_CORE = (
    "callbacks",
    "plug_in",
    "presets",
    "watch",
    "record",
    "launch",
    "allocator",
    "oom",
    "devices",
)
_BEHIND_THE_DOOR = {"planner", "drycuda", "inside", "check", "explain"}


def test_the_core_stands_alone() -> None:
    """What the planner, the check and explain do for a callback comes by `callbacks/_later.py`."""
    files = dict(trees())
    for room in _CORE:
        along = come_along(files, room)
        assert {name.partition(".")[0] for name in along} & _BEHIND_THE_DOOR == set(), room
        assert lines_of(along) <= 14_000, room
    assert any(isinstance(each, ast.FunctionDef) for each in files[DOOR].body)
    arrows = arrows_between(files, "")
    beside = {room for room in _CORE if arrows[room] & _BEHIND_THE_DOOR}
    assert beside == set(), "not inside a function either"


def test_what_contributors_are_sent_to_is_there() -> None:
    """Paths in CONTRIBUTING.md and in what a room says of additions, but for those that are to be added."""
    rooms = [path.read_text().split('"""')[1] for path in (ROOT / "trainer_plugins").rglob("*.py")]
    told = [room for room in rooms if re.search(r"^To (?:add|refuse) ", room, re.MULTILINE)]
    assert len(told) > 15
    texts = [(ROOT / "CONTRIBUTING.md").read_text(), *told]
    paths = [path for text in texts for path in re.findall(r"`((?:[a-z_]+/)+[\w.]*)`", text)]
    assert len(paths) > 50
    there = [path for path in paths if "NAME" not in path]
    assert [path for path in there if not (ROOT / path).exists()] == []


def test_whatever_is_left_to_all_has_its_turn() -> None:
    lines = [line.split() for line in (ROOT / "tests" / "turns.txt").read_text().splitlines()]
    assert {turn for turn, _ in lines} == {str(turn) for turn in range(16)}
    marked = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("test_*.py")
        if path != Path(__file__) and "mark.all" in path.read_text()
    }
    assert {name for _, name in lines} == marked
    assert len(lines) == len(marked)


def test_the_files_whose_seconds_are_known_are_there() -> None:
    lines = (ROOT / "tests" / "seconds.txt").read_text().splitlines()
    assert [line for line in lines if not (ROOT / line.split()[1]).is_file()] == []


def test_the_fast_tier_reaches_every_room() -> None:
    """By its folder, by its name, or as what a room that is named so imports."""
    files = [ROOT / name for name in (ROOT / "tests" / "fast.txt").read_text().split()]
    named = {file.parent.name for file in files}
    for file in files:
        named |= set(re.findall(r"\btrainer_plugins\.([a-z_]+)", file.read_text()))
    arrows = arrows_between(trees(), "")
    reached = named | {below for room in named & set(arrows) for below in arrows[room]}
    assert {room for room in arrows if not room.startswith("_")} <= reached


def test_a_callback_brings_only_what_it_uses_at_once() -> None:
    """Importing the package costs little beside transformers: the rest comes when it is needed."""
    code = """
import sys
from transformers import Trainer
before = set(sys.modules)
from trainer_plugins import CudaCacheCallback, EvalGenerateCleanup, KVCacheGuard, MemoryWatchdog
print(*sorted(set(sys.modules) - before))
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    names = done.stdout.split()
    strangers = {name.partition(".")[0] for name in names} - {*sys.stdlib_module_names}
    assert strangers <= {"trainer_plugins", "psutil", "pynvml"}
    late = {"launch", "accumulation", "streaming", "survival", *_BEHIND_THE_DOOR}
    files = {"callbacks.oom_reporter", "record.oom_record", "record.webhook", "upkeep.holders"}
    assert not {name.split(".")[1] for name in names if name.startswith("trainer_plugins.")} & late
    assert not {f"trainer_plugins.{name}" for name in files} & {*names}


@pytest.mark.parametrize(
    "module",
    [
        "check.gather_here", "record.timeline", "record.history", "record.metrics", "report.text",
        "report.top_page", "explain.run", "cli", "oom", "explain.text", "allocator.settings",
        "allocator.model", "planner", "launch.environment", "launch.configs", "launch.lint.judge",
        "plug_in.attachment", "run", "plug_in.options", "testing.simgpu", "testing.nvml",
        "testing.card",
    ],
)  # fmt: skip
def test_what_should_be_light_imports_neither_torch_nor_transformers(module: str) -> None:
    code = f"import sys, trainer_plugins.{module}; sys.exit(bool({{'torch', 'transformers'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
