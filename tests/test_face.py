"""The paths that people import, and what the face offers."""

import subprocess
import sys
from importlib import import_module

import pytest

import trainer_plugins

PUBLIC_PATHS = [
    "trainer_plugins",
    "trainer_plugins.allocator.in_force",
    "trainer_plugins.callbacks",
    "trainer_plugins.integrations.hydra",
    "trainer_plugins.oom",
    "trainer_plugins.presets",
    "trainer_plugins.run",
    "trainer_plugins.testing",
    "trainer_plugins.testing.card",
    "trainer_plugins.testing.nvml",
    "trainer_plugins.testing.simgpu",
]
PUBLIC_NAMES = [
    ("trainer_plugins.allocator.in_force", "check"),
    ("trainer_plugins.oom", "classify"),
    ("trainer_plugins.presets", "Preset"),
    ("trainer_plugins.testing.card", "SimCard"),
]


@pytest.mark.parametrize("path", PUBLIC_PATHS)
def test_each_name_that_a_public_path_offers_is_there(path: str) -> None:
    if path == "trainer_plugins.integrations.hydra":
        pytest.importorskip("hydra")
    module = import_module(path)
    assert [name for name in getattr(module, "__all__", ()) if not hasattr(module, name)] == []


@pytest.mark.parametrize(("path", "name"), PUBLIC_NAMES)
def test_the_documented_names_are_there(path: str, name: str) -> None:
    assert callable(getattr(import_module(path), name))


def test_the_face_shows_what_it_offers_and_no_helpers() -> None:
    shown = {name for name in dir(trainer_plugins) if not name.startswith("__")}
    assert shown == set(trainer_plugins.__all__)
    assert sorted(trainer_plugins.__all__) == trainer_plugins.__all__


def test_the_face_offers_what_its_users_catch_and_hold() -> None:
    assert issubclass(trainer_plugins.NotPredicted, trainer_plugins.PlanError)
    assert trainer_plugins.Finding.__doc__
    assert trainer_plugins.classify("CUDA out of memory.") is not None
    assert callable(trainer_plugins.read_timeline)


def test_the_face_is_light() -> None:
    code = "from trainer_plugins import Finding, classify, read_timeline"
    code += "; import sys; sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
