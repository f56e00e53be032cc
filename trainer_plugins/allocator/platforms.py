"""Lists where expandable segments do not work: one rule a row, each with its source."""

from trainer_plugins.allocator.machine import Machine


def expandable_blocker(machine: Machine) -> str | None:
    """Say why this machine should run without expandable segments; None if nothing speaks against.

    No rule could be tried for lack of such machines: they come from torch's headers and from the
    threads named here.
    """
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
