"""Machine: the torch that will read allocator settings, and where expandable segments fail."""

import platform
import re
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

TESTED = (2, 13)  # newest torch whose parser we have compared with ours


class Machine(NamedTuple):
    """Facts about one launch; the defaults are Linux, CUDA and the newest tested torch."""

    torch: tuple[int, int] = TESTED  # patch releases have not changed allocator settings
    rocm: tuple[int, int] | None = None  # the ROCm version that torch was built for, if any
    is_windows: bool = False
    is_wsl: bool = False
    is_mig: bool = False  # the process will see slices of a card
    has_vllm: bool = False  # vLLM will run in the training process

    @property
    def torch_name(self) -> str:
        """Return the version as written in messages: torch 2.13."""
        return f"torch {self.torch[0]}.{self.torch[1]}"


def gather_machine(environ: Mapping[str, str]) -> Machine:
    """Describe this machine and its torch (default: the newest tested); vLLM counts if imported."""
    from packaging.version import Version

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
        torch = Version(version("torch"))
    except PackageNotFoundError:
        return machine
    rocm = re.search(r"rocm(\d+)\.(\d+)", torch.local or "")
    return machine._replace(
        torch=(torch.major, torch.minor), rocm=(int(rocm[1]), int(rocm[2])) if rocm else None
    )


def expandable_blocker(machine: Machine) -> str | None:
    """Return why this machine should not use expandable segments; None if it may."""
    if machine.is_windows:
        return "torch for Windows has no expandable segments (pytorch#189163 adds them after 2.13)"
    if machine.is_wsl:
        return "under WSL the first allocation may fail with expandable segments (pytorch#192330)"
    if machine.rocm is not None and machine.rocm < (7, 0):
        return "torch for ROCm has expandable segments from ROCm 7.0 on (pytorch#179930)"
    if machine.is_mig:  # they query the card through NVML: NVML_SUCCESS == r INTERNAL ASSERT
        return "a MIG slice may lack the NVML rights that expandable segments need (vllm#39874)"
    if machine.has_vllm:
        return (
            "vLLM in the training process: with expandable segments its sleep mode fails before"
            " vllm#40812, and weights do not pass by CUDA IPC (pytorch#147851, vllm#42609)"
        )
    return None
