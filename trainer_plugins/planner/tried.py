"""Which versions the planner was tried with: the fake device reaches into torch, and masks differ by transformers."""

from collections.abc import Mapping

TRIED: Mapping[str, tuple[str, ...]] = {
    "torch": ("2.9", "2.13"),
    "transformers": ("4.57", "5.23"),
    "peft": ("0.17", "0.21"),
}
"""By package, the minor versions whose tests pass; the same as in docs/plan.md and in what CI installs."""


def untried(versions: Mapping[str, str]) -> list[str]:
    """Say which of the versions at hand are outside of that, each in a line.

    >>> untried({"torch": "2.13.0+cpu", "transformers": "5.24.1"})
    ['the planner has not been tried with transformers 5.24.1, only with 4.57 and 5.23']
    """
    return [
        f"the planner has not been tried with {name} {versions[name]}, only with {' and '.join(tried)}"
        for name, tried in TRIED.items()
        if name in versions and _minor(versions[name]) not in tried
    ]


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])
