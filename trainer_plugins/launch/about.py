"""Gathers what a bug report needs about this machine: no paths, no names of people, no secrets."""

import os
import platform
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from trainer_plugins.allocator.gather import gather_machine
from trainer_plugins.allocator.variables import Variables
from trainer_plugins.devices.nvml import NvmlError
from trainer_plugins.devices.nvml_cards import cards_in_words, driver_version
from trainer_plugins.launch.masked import masked_text

_PACKAGES = (
    "trainer-plugins", "torch", "transformers", "accelerate", "trl", "peft", "deepspeed",
    "bitsandbytes", "liger-kernel", "flash-attn", "unsloth", "vllm", "datasets", "triton",
)  # fmt: skip

_CONTAINERS = (Path("/.dockerenv"), Path("/run/.containerenv"))
"""Files in every container of Docker and Podman (podman-run(1), "/run/.containerenv")."""

_SCHEDULERS = {
    "SLURM_JOB_ID": "Slurm",
    "KUBERNETES_SERVICE_HOST": "Kubernetes",
    "RAY_JOB_ID": "Ray",
}


def about(environ: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Return the facts in groups: versions, machine, cards, allocator."""
    return {
        "versions": {"python": platform.python_version(), **installed_versions()},
        "machine": {"system": platform.platform(), "inside": _inside(environ)},
        "cards": _cards(),
        "allocator": {
            name: masked_text(text) for name, text in Variables.of(environ).texts.items()
        },
    }


def installed_versions() -> dict[str, str]:
    """Return the versions of the packages that matter for memory, without importing them."""
    found = {}
    for package in _PACKAGES:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def _inside(environ: Mapping[str, str]) -> str:
    """Name the scheduler, the container and the like that this process runs in."""
    around = [name for variable, name in _SCHEDULERS.items() if variable in environ]
    if gather_machine(environ).is_wsl:
        around.append("WSL")
    if any(map(os.path.exists, _CONTAINERS)):
        around.append("a container")
    return ", ".join(around) or "none found"


def _cards() -> dict[str, str]:
    try:
        driver, cards = driver_version(), Counter(cards_in_words())
    except NvmlError as error:
        return {"driver": f"none: {error}"}
    shown = "; ".join(f"{count} x {card}" for card, count in cards.items())
    return {"driver": driver, "cards": shown or "none"}
