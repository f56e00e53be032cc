"""The fixture `dry_cuda` runs a test's script on cards that do not exist.

In a conftest.py: `pytest_plugins = ["trainer_plugins.drycuda.pytest_plugin"]`.
"""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from trainer_plugins.drycuda.dry_cuda import DryCuda, unavailable_reason
from trainer_plugins.planner.cards import card_of

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def dry_cuda() -> Run:
    """Run a script in a new process on dry cards; skip the test if they are not available."""
    if reason := unavailable_reason():
        pytest.skip(reason)
    return run


def run(
    script: str | Path,
    *arguments: object,
    gpu: str = "h100-80gb",
    num_gpus: int = 1,
    numbers: bool = False,
    timeout_seconds: float = 600,
) -> "subprocess.CompletedProcess[str]":
    """Run a script to its end, and return its exit code and output.

    Args:
        script: the path of a file, or the code itself.
        arguments: the script's arguments.
        gpu: a card by name, or its size.
        num_gpus: the number of cards.
        numbers: compute every operator, so that a small model really trains.
        timeout_seconds: the time limit, which raises `subprocess.TimeoutExpired`.
    """
    first = [str(script)] if isinstance(script, Path) else ["-c", script]
    with DryCuda(card_of(gpu), num_gpus, numbers=numbers) as dry:
        return subprocess.run(
            dry.command([sys.executable, *first, *map(str, arguments)]),
            env=dry.environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_seconds,
            check=False,
        )
