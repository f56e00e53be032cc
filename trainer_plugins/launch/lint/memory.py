"""Judges the main memory that an offload needs against what the machine has."""

from collections.abc import Iterator

from trainer_plugins.finding import Finding, Severity
from trainer_plugins.launch.lint.document import Document
from trainer_plugins.launch.lint.names import offload_devices
from trainer_plugins.launch.lint.schema import part
from trainer_plugins.units import GIB, size

# Bytes of tensors per parameter after a step: ZeRO-3 with both offloads, 21M parameters, DeepSpeed
# 0.19.8 on the CPU (measured), for fp32 states; bf16 master weights and gradients; and bf16
# optimizer states too. The page cache, activations and copies at a checkpoint come on top.
_BOTH, _BF16_MASTER, _BF16_STATES = 20.1, 16.1, 12.1
_WEIGHTS = 2.0


def memory_findings(
    document: Document, num_params: float | None, host_bytes: int | None
) -> Iterator[Finding]:
    """Judge the main memory of one machine that runs all ranks."""
    offloads = offload_devices(document)
    if num_params is None or host_bytes is None or "cpu" not in offloads.values():
        return
    per_param = bytes_per_param(document, offloads)
    needed = int(num_params * per_param)
    if needed <= 0.8 * host_bytes:
        return
    pinned = [
        what
        for what, device in offloads.items()
        if device == "cpu"
        and what != "fsdp"
        and part(document.deepspeed or {}, f"zero_optimization.offload_{what}.pin_memory")
        is not False
    ]
    note = f"; pinned, so it cannot be swapped: {', '.join(pinned)}" if pinned else ""
    yield Finding(
        code="config-host-memory",
        severity=Severity.ERROR if needed > host_bytes else Severity.WARNING,
        summary=f"the offload needs {size(needed)} of main memory, and the machine has"
        f" {size(host_bytes)}",
        evidence=f"{per_param:.1f} B for each of {num_params:.3g} parameters, on one machine{note};"
        " the page cache, activations and copies at a save come on top",
        remedy="Spread it over more machines, keep bf16 states (the config one_gpu_7b_offload), put"
        " the optimizer on NVMe (zero3_offload_nvme), or train adapters",
        amount=needed / GIB,
    )


def bytes_per_param(document: Document, offloads: dict[str, str]) -> float:
    """Return the bytes of main memory that one trained parameter needs."""
    config = document.deepspeed or {}
    if "fsdp" in offloads:
        return 16.0  # fp32 weights, gradients and AdamW's two states; counted, not measured
    if part(config, "bf16.bf16_optimizer_states") is True:
        both = _BF16_STATES
    else:
        both = _BF16_MASTER if part(config, "bf16.bf16_master_weights_and_grads") is True else _BOTH
    if offloads.get("optimizer") == "cpu":
        return both if offloads.get("param") == "cpu" else both - _WEIGHTS
    return _WEIGHTS
