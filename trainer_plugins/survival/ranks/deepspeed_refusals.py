"""Which DeepSpeed runs cannot be helped, and why: by what is configured, and by the engine once it is there."""

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from transformers import Trainer

_OPTIMIZERS = ("DeepSpeedZeroOptimizer", "DeepSpeedZeroOptimizer_Stage3")

_ENGINE = (
    "optimizer",
    "zero_optimization_stage",
    "set_gradient_accumulation_boundary",
    "_running_engine_step",
)
_STAGES_1_AND_2 = ("all_grad_tensors", "averaged_gradients", "zero_grad")
"""What `zero.py` uses of them."""

_ZERO_PLUS_PLUS = (
    "zero_quantized_weights",
    "zero_quantized_nontrainable_weights",
    "zero_quantized_gradients",
)


def unsupported(trainer: Trainer) -> Iterator[str]:
    """Every reason, by name."""
    from accelerate.utils import DeepSpeedEngineWrapper

    plugin: Any = trainer.accelerator.state.deepspeed_plugin
    config: Mapping[str, Any] = plugin.deepspeed_config
    zero: Mapping[str, Any] = config.get("zero_optimization", {})
    if plugin.zero_stage == 0:
        yield "DeepSpeed without ZeRO (stage 0) is not tried: take stage 1, 2 or 3, or DDP"
    if "sync_gradients" not in inspect.signature(DeepSpeedEngineWrapper.backward).parameters:
        yield "this accelerate lets DeepSpeed count pieces as micro-batches of the window: take 1.15 or newer"
    for part in ("offload_optimizer", "offload_param"):
        if (zero.get(part) or {}).get("device") == "nvme":
            yield f"{part} to NVMe is not tried"
    if zero.get("mics_shard_size", -1) not in (-1, 0) or zero.get(
        "mics_hierarchical_params_gather"
    ):
        yield "MiCS is not tried"
    if zero.get("zero_hpz_partition_size", 1) > 1 or any(
        zero.get(name) for name in _ZERO_PLUS_PLUS
    ):
        yield "ZeRO++ (zero_hpz_partition_size, zero_quantized_*) is not tried"
    if zero.get("zenflow"):
        yield "ZenFlow updates weights inside the backward pass"
    if (zero.get("offload_optimizer") or {}).get("super_offload"):
        yield "SuperOffload is not tried"
    if config.get("compile", {}).get("deepcompile"):
        yield "DeepCompile compiles anew for every size of a piece"
    if config.get("sequence_parallel_size", 1) > 1:
        yield "sequence parallelism is not supported: every rank holds a part of each row"
    if config.get("tensor_parallel", {}).get("autotp_size", 0) > 1:
        yield "tensor parallelism (autotp_size) is not supported: its ranks hold the same rows"
    if "pipeline" in config or hasattr(trainer.model, "pipeline_enable"):
        yield "pipeline parallelism is not supported: it cuts micro-batches itself"
    if any(kind.__module__.startswith("trl.") for kind in type(trainer).__mro__):
        yield "trainers of TRL gather metrics inside each micro-batch: under DeepSpeed that is not tried"
    yield from _of_engine(getattr(trainer, "deepspeed", None))


def _of_engine(engine: Any) -> Iterator[str]:
    if engine is None:
        return  # not there yet: asked again at the first micro-batch
    name = type(engine.optimizer).__name__
    if name not in _OPTIMIZERS:
        yield f"DeepSpeed's {name} is not tried"
    missing = [attribute for attribute in _ENGINE if not hasattr(engine, attribute)]
    if engine.zero_optimization_stage() < 3:
        missing += [
            attribute for attribute in _STAGES_1_AND_2 if not hasattr(engine.optimizer, attribute)
        ]
    if missing:
        yield f"this version of DeepSpeed has no {', '.join(missing)}: please report it"
