"""Keep the measured errors of plans, and the versions with which the planner was tested."""

from collections.abc import Mapping
from importlib.metadata import version

from trainer_plugins.planner.plan import MemoryPlan

TRIED: Mapping[str, tuple[str, ...]] = {
    "torch": ("2.9", "2.13"),
    "transformers": ("4.57", "5.23", "5.24"),
    "peft": ("0.17", "0.21"),
}  # minor versions that pass the tests; docs/plan.md names them, CI installs them

# the largest excess of a published run over its planned reserved memory, as a fraction of the plan
KNOWN_ERROR_OF_RESERVED = 0.046
KNOWN_ERROR_IF_QUANTISED = 0.144


def is_safe(plan: MemoryPlan) -> bool:
    """Return whether the run fits, in main memory too, even with the largest known error."""
    return plan.host_shortage is None and (plan.margin_bytes or 0) >= error_bytes(plan)


def error_bytes(plan: MemoryPlan) -> int:
    """Return the largest likely error of a plan; its context is as uncertain as the rest."""
    return margin_bytes(plan.needed_bytes, "quantised" in plan.planned)


def margin_bytes(reserved_bytes: int, is_quantised: bool = False) -> int:
    """Return the margin to leave free beside this much reserved memory."""
    error = KNOWN_ERROR_IF_QUANTISED if is_quantised else KNOWN_ERROR_OF_RESERVED
    return int(reserved_bytes * error)


def is_transformers_4() -> bool:
    """Return whether transformers 4 is installed.

    Version 5 loads in the config's dtype, maps the files, and lets every weight train.
    """
    return version("transformers").startswith("4.")


def describe_error(is_quantised: bool = False) -> str:
    """Describe the difference between plans and published figures."""
    if is_quantised:
        rows = "allocated within 1.1 %, reserved -12.6 to +15.3 % (41 published QLoRA runs)"
    else:
        rows = "allocated within 0.01 % (33 published runs), reserved within 4.4 % (75 runs)"
    return f"{rows} (docs/internals/plans.md)"


def name_untried(versions: Mapping[str, str]) -> list[str]:
    """Name the packages whose version the planner was not tested with, one per line.

    >>> name_untried({"torch": "2.13.0+cpu", "transformers": "5.25.1"})
    ['the planner was not tested with transformers 5.25.1, only with 4.57, 5.23, 5.24']
    """
    return [
        f"the planner was not tested with {name} {versions[name]}, only with {', '.join(tried)}"
        for name, tried in TRIED.items()
        if name in versions and ".".join(versions[name].split(".")[:2]) not in tried
    ]
