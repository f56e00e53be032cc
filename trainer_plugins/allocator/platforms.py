"""Where expandable segments do not work. One rule a row, each with its source."""

from trainer_plugins.allocator.machine import Machine


def expandable_blocker(machine: Machine) -> str | None:
    """Say why this machine should run without expandable segments, or None where nothing speaks against them.

    None of it could be run for want of such machines: it is what torch's headers and the threads
    named here say.
    """
    rules = (
        # CUDAAllocatorConfig.h: without the driver API torch warns once and goes on without.
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
        # The segments ask NVML for the card, and a slice often has no right to: NVML_SUCCESS == r
        # INTERNAL ASSERT.
        (
            machine.is_mig,
            "a MIG slice may lack the NVML rights that expandable segments need (vllm#39874)",
        ),
        (
            machine.has_vllm,
            "vLLM in the training process: with expandable segments its sleep mode fails before vllm#40812, and "
            "weights do not pass by CUDA IPC (pytorch#147851, vllm#42609)",
        ),
    )
    return next((why for applies, why in rules if applies), None)
