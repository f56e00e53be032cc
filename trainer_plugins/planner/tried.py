"""Which versions the planner was tried with: the fake device reaches into torch, and masks differ by transformers."""

from collections.abc import Mapping

TRIED: Mapping[str, tuple[str, ...]] = {
    "torch": ("2.9", "2.13"),
    "transformers": ("4.57", "5.23"),
    "peft": ("0.17", "0.21"),
}
"""By package, the minor versions whose tests pass; the same as in docs/plan.md and in what CI installs."""


MEASURED = ("4.57", "5.0", "5.13", "5.15", "5.17")
"""The minor versions of transformers of the published figures that were replayed (docs/plan_measured.md)."""

_KNOWN_ERROR = (
    "allocated: within 0.15 % of 33 published max_memory_allocated figures (RTX A6000, T4); reserved: within 4.4 % "
    "of 59 (L40S, T4), see docs/plan_measured.md. Not measured by us on a GPU"
)


def known_error(versions: Mapping[str, str]) -> str:
    """Say how far plans were from published figures, and where this one is of another transformers than those.

    >>> known_error({"transformers": "5.23.0"}).partition("GPU. ")[2]  # doctest: +ELLIPSIS
    'Those were of transformers 4.57, 5.0, 5.13, 5.15 and 5.17, this plan is of 5.23.0: ...'
    """
    own = versions.get("transformers", "")
    if _minor(own) in MEASURED:
        return _KNOWN_ERROR
    return (
        f"{_KNOWN_ERROR}. Those were of transformers {', '.join(MEASURED[:-1])} and {MEASURED[-1]}, this plan is of "
        f"{own}: where a plan and the run were of versions a year apart, 4 to 20 % was seen, all of it the version"
    )


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
