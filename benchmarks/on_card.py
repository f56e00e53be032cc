"""Measure on a CUDA card what the simulated one cannot show: survival, streaming, launch files.

    python -m benchmarks.on_card [survival] [streaming] [launch]

Each part runs in its own process, one after the other, so that a failure does not affect the rest;
a failed part is reported with its last lines, and its earlier figures are kept. Figures are called
`row: field`, and each part's are printed as a table.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from time import perf_counter

import torch

ROOT = Path(__file__).parents[1]
PARTS = {
    "survival": "benchmarks.card_survival",
    "streaming": "benchmarks.card_streaming",
    "launch": "benchmarks.card_launch",
}
TIMEOUT_SECONDS = 200
_MARK = "figure "
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
}


def tell(part: str) -> None:
    """Print each figure of a part as soon as it is known, for the parent process."""
    figures: Callable[[], Iterator[tuple[str, float]]] = import_module(PARTS[part]).figures
    for name, value in figures():
        print(_MARK + json.dumps([name, value]), flush=True)


def run(part: str) -> tuple[dict[str, float], bool]:
    """Run a part; return its figures and whether it completed. Its other output is shown."""
    figures: dict[str, float] = {}
    code = f"from benchmarks.on_card import tell; tell({part!r})"
    process = subprocess.Popen(
        ["timeout", "-k", "5", str(TIMEOUT_SECONDS), sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, **_ENVIRONMENT},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    said: list[str] = []
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(_MARK):
            name, value = json.loads(line.removeprefix(_MARK))
            figures[name] = float(value)
        elif line.strip():
            said.append(line.rstrip())
    if process.wait():
        print(f"FAILED: {part}, exit code {process.returncode}; its last lines:")
        print("\n".join(said[-15:]), flush=True)
    return figures, process.returncode == 0


def table(figures: dict[str, float]) -> str:
    """Lay out figures called `row: field`: rows with the same fields one below the other.

    >>> print(table({"a: s": 1.5, "a: GiB": 2.0, "bus: GB/s": 0.25, "b: s": 3, "b: GiB": 10}))
         s  GiB
    a  1.5    2
    b    3   10
    <BLANKLINE>
         GB/s
    bus  0.25
    """
    rows: dict[str, dict[str, str]] = {}
    for name, value in figures.items():
        row, _, field = name.rpartition(": ")
        rows.setdefault(row, {})[field] = f"{value:.5g}"
    groups: dict[tuple[str, ...], list[list[str]]] = {}
    for row, found in rows.items():
        groups.setdefault(tuple(found), [["", *found]]).append([row, *found.values()])
    return "\n\n".join(map(_aligned, groups.values()))


def _aligned(lines: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if at else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def measure(parts: tuple[str, ...] = tuple(PARTS)) -> dict[str, float]:
    """Return all figures as `part: row: field`, and print each part's table.

    Raises:
        RuntimeError: there is no CUDA card.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("this benchmark measures on a CUDA card, and there is none here")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    results: dict[str, float] = {}
    if "launch" in parts and parts[0] != "launch":
        # It uses other cores than the first part.
        import_module(PARTS["launch"]).compile_adam()
    for part in parts:
        started = perf_counter()
        figures, is_whole = run(part)
        took = perf_counter() - started
        print(f"== {part}: {took:.0f} s{'' if is_whole else ', FAILED'}")
        print(table(figures), flush=True)
        results |= {f"{part}: {name}": value for name, value in figures.items()}
        results[f"{part}: ran to its end"] = float(is_whole)
    return results


def main(words: list[str]) -> int:
    """Measure the named parts, or all; return 0 if they completed."""
    if unknown := set(words) - set(PARTS):
        print(f"no part is named {', '.join(sorted(unknown))}: there are {', '.join(PARTS)}")
        return 2
    results = measure(tuple(words) or tuple(PARTS))
    return 0 if all(v for name, v in results.items() if name.endswith("ran to its end")) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
