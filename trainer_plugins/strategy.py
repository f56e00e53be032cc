"""Strategy: as what a training runs: how many ranks, wrapped in what, divided how, and where its parts live."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from trainer_plugins.printable import printable
from trainer_plugins.units import percent


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """What really runs, read from the objects of the running process, on one rank."""

    distributed_type: str
    """accelerate's name for it: `DEEPSPEED`, `FSDP`, `MULTI_GPU`, `MULTI_CPU`, `NO`."""

    wrapped_class: str
    """The class that training calls: `DeepSpeedEngine`, `DistributedDataParallel`, or the model's own."""

    family: str
    """What that class is: `DeepSpeed`, `FSDP`, `DDP`, `DataParallel`, `nothing`, or `unknown` (as on XLA)."""

    world_size: int
    """Ranks that train together, over all machines."""

    device: str
    """Type of the device: `cuda`, `cpu`."""

    num_params: int
    """Elements of all parameters of the whole model, those of 4-bit weights unpacked."""

    num_machines: int | None = None
    """None where the launcher does not tell it."""

    num_partitioned: int = 0
    """Elements of parameters that are divided among the ranks; the others are whole on each."""

    zero_stage: int | None = None
    """None where no DeepSpeed runs."""

    offload: Mapping[str, str] = field(default_factory=dict)
    """What is kept off the device, and where: `{"optimizer": "cpu", "param": "nvme"}`."""

    homes: Mapping[str, int] = field(default_factory=dict)
    """Elements of this rank's parameters by where they live between steps: a type of device, or `nvme`."""

    optimizer_class: str | None = None
    """The class that updates the weights, without its wrappers: `AdamW`, `DeepSpeedCPUAdam`."""

    master_dtype: str | None = None
    """The dtype in which the optimizer keeps the weights, None where it has none to train."""

    is_checkpointing: bool = False
    """The model computes activations again in the backward pass."""

    @property
    def partitioned_fraction(self) -> float:
        """The share of the model's elements that is divided among the ranks."""
        return self.num_partitioned / self.num_params if self.num_params else 0.0

    def __str__(self) -> str:
        stage = "" if self.zero_stage is None else f", ZeRO-{self.zero_stage}"
        ranks = f"{self.world_size} rank" + "s" * (self.world_size != 1)
        machines = f" on {self.num_machines} machines" if (self.num_machines or 1) > 1 else ""
        divided = (
            f", {percent(self.partitioned_fraction)} of {self.num_params:,} parameters divided"
        )
        off = "".join(f", {what} on {where}" for what, where in self.offload.items())
        update = (
            f", {self.optimizer_class} on {self.master_dtype} weights" if self.master_dtype else ""
        )
        return printable(
            f"{ranks}{machines} of {self.wrapped_class} on {self.device}{stage}{divided}{off}{update}"
        )
