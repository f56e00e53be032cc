"""Looks up which versions are installed, without importing what is looked up."""

from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

_PACKAGES = (
    "trainer-plugins", "torch", "transformers", "accelerate", "trl", "peft", "deepspeed",
    "bitsandbytes", "liger-kernel", "flash-attn", "unsloth", "vllm", "datasets", "triton",
)  # fmt: skip


def installed_versions() -> dict[str, str]:
    """Return the versions of those packages that decide about memory, by name."""
    found = {}
    for package in _PACKAGES:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found
