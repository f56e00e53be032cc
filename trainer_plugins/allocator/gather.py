"""Gather the facts that decide about allocator settings, without importing torch."""

import platform
import sys
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version

from trainer_plugins.allocator.machine import Machine, read_torch_version


def gather_machine(environ: Mapping[str, str]) -> Machine:
    """Look at this machine and its torch (if none, the newest tested); vLLM counts if imported."""
    machine = Machine(
        is_windows=platform.system() == "Windows",
        is_wsl="microsoft" in platform.release().lower(),
        is_mig=any(
            "MIG-" in environ.get(name, "")
            for name in ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES")
        ),
        has_vllm="vllm" in sys.modules,
    )
    try:
        torch, rocm = read_torch_version(version("torch"))
    except PackageNotFoundError:
        return machine
    return replace(machine, torch=torch, rocm=rocm)
