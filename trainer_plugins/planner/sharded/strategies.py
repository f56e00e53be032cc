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
_BESIDE = ("dp_replicate_size", "dp_shard_size", "cp_size", "sp_size")
_ALONE = "alone, among all cards of a run, it is planned"


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
    sizes = sizes_of(request.environment, args)
    divides_rows = sizes.get("cp_size", 1) * sizes.get("sp_size", 1) > 1
    _check_who_divides(sizes, deepspeed is not None, version)
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
    if sizes.get("tp_size", 1) > 1:
        from trainer_plugins.planner.sharded.tensors import TensorParallel

        _check_tensors(request, sizes["tp_size"])
        return TensorParallel(request)
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
    """Return how many cards work on the same rows."""
    sizes = sizes_of(request.environment, args)
    return sizes.get("cp_size", 1) * sizes.get("sp_size", 1) * sizes.get("tp_size", 1)


def _check_who_divides(sizes: Mapping[str, int], by_deepspeed: bool, version: int | None) -> None:
    """Refuse to divide rows where accelerate does not.

    Raises:
        NotPredicted: neither FSDP2 nor DeepSpeed is there to do it.
    """
    if sizes.get("cp_size", 1) > 1 and (by_deepspeed or version != 2):
        raise NotPredicted("context parallelism (cp_size) without FSDP2")
    if sizes.get("sp_size", 1) > 1 and not by_deepspeed:
        raise NotPredicted("sequence parallelism (sp_size) without DeepSpeed")
    if sizes.get("tp_size", 1) > 1 and (by_deepspeed or version is not None):
        raise NotPredicted(
            f"tensor parallelism (tp_size) with {'DeepSpeed' if by_deepspeed else 'FSDP'}: {_ALONE}"
        )


def _check_tensors(request: PlanRequest, num_cards: int) -> None:
    """Refuse to divide a model that is not built here, or among only some of the cards.

    Raises:
        PlanError: the run cannot start.
        NotPredicted: it is quantised, streamed, or a Trainer's.
    """
    _refuse_quantised(request, "tensor parallelism")
    if not isinstance(request.source, ConfigSource):
        raise NotPredicted(
            f"tensor parallelism (tp_size {num_cards}) of a Trainer: a plan of its config is"
        )
    if request.source.trainer is not None:
        raise NotPredicted(
            f"tensor parallelism (tp_size {num_cards}) with --trainer {request.source.trainer}"
        )
    if request.resident_layers is not None:
        raise NotPredicted("a base that is streamed, under tensor parallelism")
    if request.num_gpus != num_cards:
        raise PlanError(
            f"tp_size is {num_cards}, and there are {request.num_gpus} GPUs: without other groups "
            "of cards they are as many"
        )


def sizes_of(exported: Mapping[str, str], args: Arguments) -> Mapping[str, int]:
    """Return the sizes in accelerate's ParallelismConfig, of the arguments or of a launcher.

    Args:
        exported: the environment of the launcher.
        args: the arguments of the Trainer, which win.
    """
    if (config := getattr(args, "parallelism_config", None)) is not None:
        return {name: size for name, size in vars(config).items() if name.endswith("size")}
    if exported.get("ACCELERATE_USE_PARALLELISM_CONFIG", "").lower() != "true":
        return {}
    return {
        name.removeprefix(_EXPORTED).lower(): int(size)
        for name, size in exported.items()
        if name.startswith(_EXPORTED) and name.endswith("SIZE")
    }


def refuse_parallelism(sizes: Mapping[str, object], where: str) -> None:
    """Refuse cards that share the tensors of a model, and something else with other cards.

    Args:
        sizes: the fields of accelerate's ParallelismConfig that end in `_size`, among others.
        where: what has these fields, for the message.

    Raises:
        NotPredicted: they do.
    """
    if (size := sizes.get("tp_size")) in (None, 1):
        return
    beside = [f"{name} {sizes[name]}" for name in _BESIDE if sizes.get(name) not in (None, 1)]
    if beside:
        raise NotPredicted(
            f"tensor parallelism (tp_size {size} in {where}) with {', '.join(beside)}: {_ALONE}"
        )


def _refuse_quantised(request: PlanRequest, by: str) -> None:
    source = request.source
    if isinstance(source, ConfigSource) and (
        source.quantisation or source.config.get("quantization_config")
    ):
        raise NotPredicted(f"a quantised base under {by}; on one card and under DDP it is")


def _refuse_other_batches(request: PlanRequest, args: Arguments) -> None:
    """Refuse settings that change the micro-batch of a rank."""
    refuse_parallelism(sizes_of(request.environment, args), "parallelism_config")
    loading, rows = args.accelerator_config, args.per_device_train_batch_size
    if request.num_gpus > 1 and loading.split_batches:
        if rows % request.num_gpus:
            raise PlanError(
                f"split_batches cannot divide {rows} rows among {request.num_gpus} GPUs"
            )
        raise NotPredicted("split_batches (accelerator_config)")
    if request.num_gpus > 1 and loading.dispatch_batches:
        raise NotPredicted("dispatch_batches (accelerator_config)")
