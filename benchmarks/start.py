"""Measure the package's share of Python's start-up time, installed and under `exec`."""

import os
import subprocess
import sys
from collections.abc import Mapping
from statistics import median
from time import perf_counter

from trainer_plugins import _site

ROUNDS = 20
HOOKED = {"PYTHONPATH": os.pathsep.join([*_site.__path__, os.environ.get("PYTHONPATH", "")])}
HOOKED["TRAINER_PLUGINS_ATTACH"] = "{}"

STARTS: dict[str, tuple[list[str], Mapping[str, str]]] = {
    "python": (["-c", "pass"], {}),
    "python, under exec": (["-c", "pass"], HOOKED),
    "import trainer_plugins": (["-c", "import trainer_plugins"], {}),
    "attach(), without a Trainer": (["-c", "import trainer_plugins; trainer_plugins.attach()"], {}),
    "trainer-plugins --help": (["-m", "trainer_plugins", "--help"], {}),
    "trainer-plugins exec -- true": (["-m", "trainer_plugins", "exec", "--", "true"], {}),
}


def milliseconds(arguments: list[str], environ: Mapping[str, str]) -> float:
    """Measure one start and end of Python, in milliseconds."""
    start = perf_counter()
    subprocess.run(
        [sys.executable, *arguments], check=True, capture_output=True, env={**os.environ, **environ}
    )
    return (perf_counter() - start) * 1000


def measure() -> dict[str, float]:
    """Return milliseconds per start, and the additions to a bare Python's; medians of 20 rounds."""
    took: dict[str, list[float]] = {name: [] for name in STARTS}
    for _ in range(ROUNDS):
        for name, (arguments, environ) in STARTS.items():
            took[name].append(milliseconds(arguments, environ))
    results = {"python: start_ms": median(took["python"])}
    for name, values in took.items():
        if name != "python":
            added = (one - bare for one, bare in zip(values, took["python"], strict=True))
            results[f"{name}: added_ms"] = median(added)
    return results


if __name__ == "__main__":
    for name, value in measure().items():
        print(f"{name}: {value:.1f}")
