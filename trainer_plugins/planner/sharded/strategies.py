"""Choose how work is divided among cards.

A strategy surrounds the rehearsal, which then runs as one rank of many.
"""

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Protocol

from trainer_plugins.planner.plan import NotPredicted, PlanError
from trainer_plugins.planner.request import ConfigSource, PlanRequest
from trainer_plugins.planner.sharded.zero_config import read_config
from trainer_plugins.planner.tracing.trace import Tracker
from trainer_plugins.planner.trainer import Arguments, TrainerLike

_EXPORTED = "PARALLELISM_CONFIG_"


class Strategy(Protocol):
    """Says what one way to divide the work changes."""

    not_predicted: tuple[str, ...]
    """Memory of such a run that its figures leave out."""

    not_reliable: tuple[str, ...]
    """Which of its figures are less reliable, and why."""

    def around(self, tracker: Tracker) -> contextlib.AbstractContextManager[None]:
        """Patch torch and others while the Trainer is built and runs."""

    def prepare(self, trainer: TrainerLike) -> None:
        """Check the Trainer before it runs.

        Raises:
            NotPredicted: its run cannot be predicted under this strategy.
        """


class SingleGpu:
    """Keeps everything on one card."""

    not_predicted: tuple[str, ...] = ()
    not_reliable: tuple[str, ...] = ()

    @contextlib.contextmanager
    def around(self, tracker: Tracker) -> Iterator[None]:
        yield

    def prepare(self, trainer: TrainerLike) -> None:
        pass


def strategy_of(request: PlanRequest, args: Arguments) -> Strategy:
    """Choose the strategy that the launch and the arguments ask for.

    Raises:
        PlanError: they contradict each other.
        NotPredicted: the planner has no such strategy.
    """
    _refuse_other_batches(request, args)
    # the Trainer's arguments win over a launcher's
    deepspeed = getattr(args, "deepspeed", None) or request.deepspeed
    version = fsdp_version(request, args)
    divides_rows = cards_of_a_row(request, args) > 1
    _check_who_divides(_sizes_of(request, args), deepspeed is not None, version)
    if deepspeed is not None:
        _refuse_quantised(request, "DeepSpeed")
        from trainer_plugins.planner.sharded.zero import zero_strategy

        return zero_strategy(read_config(deepspeed), request, args, divides_rows)
    if version is not None:
        _refuse_quantised(request, "FSDP")
    if version == 1:
        from trainer_plugins.planner.sharded.fsdp1 import Fsdp1

        return Fsdp1(request)
    if request.device != "cuda" and (version is not None or request.num_gpus > 1):
        raise NotPredicted(f"several ranks on {request.device}")
    if version is not None:
        from trainer_plugins.planner.sharded.context import ContextParallel
        from trainer_plugins.planner.sharded.fsdp2 import Fsdp2

        return ContextParallel(request) if divides_rows else Fsdp2(request)
    if request.num_gpus > 1:
        from trainer_plugins.planner.sharded.ddp import Ddp

        return Ddp(request)
    return SingleGpu()


def fsdp_version(request: PlanRequest, args: Arguments) -> int | None:
    """Return the version of FSDP that the launch and the arguments ask for; None is no FSDP.

    The arguments win, and transformers 5 says in them what it makes of them. Otherwise accelerate
    reads the environment, to which transformers 4 writes.
    """
    asked = getattr(args, "fsdp", None)
    if not asked and request.environment.get("ACCELERATE_USE_FSDP") != "true":
        return None
    given = getattr(args, "fsdp_plugin_args", None) or {}
    return int(given.get("fsdp_version") or os.environ.get("FSDP_VERSION", "1"))


def cards_of_a_row(request: PlanRequest, args: Arguments) -> int:
    """Return among how many cards the tokens of a row are divided."""
    sizes = _sizes_of(request, args)
    return sizes.get("cp_size", 1) * sizes.get("sp_size", 1)


def _check_who_divides(sizes: Mapping[str, int], by_deepspeed: bool, version: int | None) -> None:
    """Refuse to divide rows where accelerate does not.

    Raises:
        NotPredicted: neither FSDP2 nor DeepSpeed is there to do it.
    """
    if sizes.get("cp_size", 1) > 1 and (by_deepspeed or version != 2):
        raise NotPredicted("context parallelism (cp_size) without FSDP2")
    if sizes.get("sp_size", 1) > 1 and not by_deepspeed:
        raise NotPredicted("sequence parallelism (sp_size) without DeepSpeed")


def _sizes_of(request: PlanRequest, args: Arguments) -> Mapping[str, int]:
    """Return the sizes in accelerate's ParallelismConfig, of the arguments or of a launcher."""
    if (config := getattr(args, "parallelism_config", None)) is not None:
        return {name: size for name, size in vars(config).items() if name.endswith("size")}
    exported = request.environment
    if exported.get("ACCELERATE_USE_PARALLELISM_CONFIG", "").lower() != "true":
        return {}
    return {
        name.removeprefix(_EXPORTED).lower(): int(size)
        for name, size in exported.items()
        if name.startswith(_EXPORTED) and name.endswith("SIZE")
    }


def refuse_parallelism(sizes: Mapping[str, object], where: str) -> None:
    """Refuse cards that share the tensors of a model.

    Args:
        sizes: the fields of accelerate's ParallelismConfig that end in `_size`, among others.
        where: what has these fields, for the message.

    Raises:
        NotPredicted: they do.
    """
    if (size := sizes.get("tp_size")) not in (None, 1):
        raise NotPredicted(
            f"tensor parallelism (tp_size {size} in {where}): transformers divides the weights "
            "while it reads them, and a plan reads none; dp_shard_size, cp_size and sp_size are "
            "planned"
        )


def _refuse_quantised(request: PlanRequest, by: str) -> None:
    source = request.source
    if isinstance(source, ConfigSource) and (
        source.quantisation or source.config.get("quantization_config")
    ):
        raise NotPredicted(f"a quantised base under {by}; on one card and under DDP it is")


def _refuse_other_batches(request: PlanRequest, args: Arguments) -> None:
    """Refuse settings that change the micro-batch of a rank."""
    refuse_parallelism(_sizes_of(request, args), "parallelism_config")
    loading, rows = args.accelerator_config, args.per_device_train_batch_size
    if request.num_gpus > 1 and loading.split_batches:
        if rows % request.num_gpus:
            raise PlanError(
                f"split_batches cannot divide {rows} rows among {request.num_gpus} GPUs"
            )
        raise NotPredicted("split_batches (accelerator_config)")
    if request.num_gpus > 1 and loading.dispatch_batches:
        raise NotPredicted("dispatch_batches (accelerator_config)")
