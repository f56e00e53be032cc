"""Machine: the torch that will read allocator settings, and where expandable segments fail."""

import re
from dataclasses import dataclass

TESTED = (2, 13)  # the newest torch whose own parser this package was checked against


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Holds the facts of one launch; the defaults are Linux, CUDA and the newest tested torch."""

    torch: tuple[int, int] = TESTED  # patch releases changed no allocator settings
    rocm: tuple[int, int] | None = None  # the ROCm that torch was built for, if any
    is_windows: bool = False
    is_wsl: bool = False
    is_mig: bool = False  # whether the process will see slices of a card instead of whole cards
    has_vllm: bool = False  # whether vLLM will run inside the training process

    @property
    def torch_name(self) -> str:
        """Return the version as messages write it: torch 2.13."""
        return f"torch {self.torch[0]}.{self.torch[1]}"


def read_torch_version(text: str) -> tuple[tuple[int, int], tuple[int, int] | None]:
    """Read (major, minor) of a torch build, and the same of ROCm if it is built for it.

    >>> read_torch_version("2.13.0+cpu"), read_torch_version("2.10.0+rocm7.0.1")
    (((2, 13), None), ((2, 10), (7, 0)))
    """
    version = re.match(r"(\d+)\.(\d+)", text)
    if version is None:
        raise ValueError(f"a version of torch starts with two numbers, as in 2.13.0, got {text!r}")
    rocm = re.search(r"\+.*?rocm(\d+)\.(\d+)", text)
    return (int(version[1]), int(version[2])), (int(rocm[1]), int(rocm[2])) if rocm else None


def expandable_blocker(machine: Machine) -> str | None:
    """Say why this machine should run without expandable segments; None if it may use them."""
    rules = (
        # CUDAAllocatorConfig.h: without the driver API torch warns once and ignores the option.
        (
            machine.is_windows,
            "torch for Windows has no expandable segments (pytorch#189163 adds them after 2.13)",
        ),
        (
            machine.is_wsl,
            "under WSL the first allocation may fail with expandable segments (pytorch#192330)",
        ),
        (
            machine.rocm is not None and machine.rocm < (7, 0),
            "torch for ROCm has expandable segments from ROCm 7.0 on (pytorch#179930)",
        ),
        # The segments ask NVML for the card, which a slice is often not allowed to do: NVML_SUCCESS
        # == r INTERNAL ASSERT.
        (
            machine.is_mig,
            "a MIG slice may lack the NVML rights that expandable segments need (vllm#39874)",
        ),
        (
            machine.has_vllm,
            "vLLM in the training process: with expandable segments its sleep mode fails before"
            " vllm#40812, and weights do not pass by CUDA IPC (pytorch#147851, vllm#42609)",
        ),
    )
    return next((why for applies, why in rules if applies), None)
