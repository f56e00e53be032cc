"""Strategy: the setup of a training run: ranks, wrapper, ZeRO stage, where each part lives."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from trainer_plugins.printable import printable
from trainer_plugins.units import percent


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """Describes the strategy that really runs on one rank, read from the process's objects."""

    distributed_type: str  # accelerate's name: `DEEPSPEED`, `FSDP`, `MULTI_GPU`, `MULTI_CPU`, `NO`
    wrapped_class: str  # the class that training calls: `DeepSpeedEngine`, the model's own
    family: str  # `DeepSpeed`, `FSDP`, `DDP`, `DataParallel`, `nothing`, or `unknown` (as on XLA)
    world_size: int  # number of ranks that train together, over all machines
    device: str  # device type: `cuda`, `cpu`
    num_params: int  # elements of all parameters of the full model; 4-bit weights count unpacked
    num_machines: int | None = None  # number of machines; None if the launcher does not say
    num_partitioned: int = 0  # elements of sharded parameters; each rank holds the others in full
    zero_stage: int | None = None  # the ZeRO stage; None without DeepSpeed
    offload: Mapping[str, str] = field(default_factory=dict)  # `{"param": "nvme"}`
    homes: Mapping[str, int] = field(default_factory=dict)  # elements by device type
    optimizer_class: str | None = None  # it updates the weights: `AdamW`, `DeepSpeedCPUAdam`
    master_dtype: str | None = None  # of the weights that the optimizer keeps, if it trains any
    is_checkpointing: bool = False  # whether the model recomputes activations in the backward pass

    @property
    def partitioned_fraction(self) -> float:
        """Return the share of the model's elements that is sharded across ranks."""
        return self.num_partitioned / self.num_params if self.num_params else 0.0

    def __str__(self) -> str:
        text = "1 rank" if self.world_size == 1 else f"{self.world_size} ranks"
        if self.num_machines is not None and self.num_machines > 1:
            text += f" on {self.num_machines} machines"
        text += f" of {self.wrapped_class} on {self.device}"
        if self.zero_stage is not None:
            text += f", ZeRO-{self.zero_stage}"
        parameters = f"{self.num_params:,} parameters"
        if self.world_size > 1 or self.num_partitioned:
            parameters = f"{percent(self.partitioned_fraction)} of {parameters} sharded"
        text += f", {parameters}"
        for part, home in self.offload.items():
            text += f", {part} on {home}"
        if self.master_dtype:
            text += f", {self.optimizer_class} on {self.master_dtype} weights"
        return printable(text)


def reduces_each_time(accelerator_config: object) -> bool:
    """Return whether FSDP reduces the gradients of each micro-batch, and keeps none whole.

    >>> reduces_each_time('{"gradient_accumulation_kwargs": {"sync_each_batch": true}}')
    True
    """
    return re.search(r"sync_each_batch\W+true", str(accelerator_config), re.IGNORECASE) is not None


def keeps_whole_gradients(arguments: Mapping[str, object]) -> bool:
    """Return whether FSDP keeps whole gradients between micro-batches with these arguments."""
    num_steps = arguments.get("gradient_accumulation_steps")
    accumulates = isinstance(num_steps, int) and num_steps > 1
    return accumulates and not reduces_each_time(arguments.get("accelerator_config"))
