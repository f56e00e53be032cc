"""Stories about the driver library run in processes of their own: a process keeps the first library that it finds."""

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainer_plugins.testing.nvml import unavailable_reason

REPOSITORY = Path(__file__).parents[2]
CALL = "import importlib, pathlib, sys; getattr(importlib.import_module({!r}), {!r}).__wrapped__(pathlib.Path({!r}))"


def needs_scripted_nvml() -> None:
    """Skip what follows in a module where the library cannot be compiled; in CI it can, or the tests are to fail."""
    reason = unavailable_reason()
    if reason and not os.environ.get("CI"):
        pytest.skip(reason, allow_module_level=True)


def alone(story):
    """Run a story, a test function that takes `tmp_path` only, in a fresh process."""

    @functools.wraps(story)
    def run(tmp_path):
        code = CALL.format(story.__module__, story.__name__, str(tmp_path))
        outcome = subprocess.run(
            [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=600, check=False
        )
        assert outcome.returncode == 0, f"{outcome.stdout}\n{outcome.stderr}"

    return run
