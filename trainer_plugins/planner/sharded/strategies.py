"""Choose how work is divided among cards: a strategy surrounds the rehearsal."""

from collections.abc import Mapping

from trainer_plugins.hf_trainer import HfArguments
from trainer_plugins.planner.kind import Kind, Wrapper
from trainer_plugins.planner.one_card import OneCard
from trainer_plugins.planner.plan import NotPredicted, PlanError
from trainer_plugins.planner.request import ConfigSource, PlanRequest
from trainer_plugins.planner.sharded.zero_config import read_config

_ALONE = "it is predicted only alone, among all cards of a run"
_OTHER_SIZES = ("dp_replicate_size", "dp_shard_size", "cp_size", "sp_size")


def strategy_of(request: PlanRequest, args: HfArguments, kind: Kind) -> OneCard:
    """Choose the strategy that the launch and the arguments ask for."""
    refuse_parallelism(kind.sizes, "parallelism_config")
    _refuse_other_batches(request, args)
    _check_who_divides(kind)
    divides_rows = kind.sizes.get("cp_size", 1) * kind.sizes.get("sp_size", 1) > 1
    if kind.wrapper is Wrapper.DEEPSPEED:
        _refuse_quantised(request, kind, "DeepSpeed")
        from trainer_plugins.planner.sharded.zero import zero_strategy

        return zero_strategy(read_config(kind.deepspeed), request, args, divides_rows)
    if kind.wrapper in (Wrapper.FSDP1, Wrapper.FSDP2):
        _refuse_quantised(request, kind, "FSDP")
    if kind.wrapper is Wrapper.FSDP1:
        from trainer_plugins.planner.sharded.fsdp1 import Fsdp1

        return Fsdp1(request)
    if request.device != "cuda" and (kind.wrapper is Wrapper.FSDP2 or request.num_gpus > 1):
        raise NotPredicted(f"several ranks on {request.device}")
    if kind.wrapper is Wrapper.FSDP2:
        from trainer_plugins.planner.sharded.fsdp2 import ContextParallel, Fsdp2

        return ContextParallel(request) if divides_rows else Fsdp2(request)
    if kind.wrapper is Wrapper.TENSOR_PARALLEL:
        from trainer_plugins.planner.sharded.tensors import TensorParallel

        _check_tensors(request, kind)
        return TensorParallel(request)
    if kind.wrapper is Wrapper.DDP:
        from trainer_plugins.planner.sharded.ddp import Ddp

        return Ddp(request)
    return OneCard()


def _check_who_divides(kind: Kind) -> None:
    """Refuse to divide rows or tensors where accelerate does not."""
    sizes, wrapper = kind.sizes, kind.wrapper
    if sizes.get("cp_size", 1) > 1 and wrapper is not Wrapper.FSDP2:
        raise NotPredicted("context parallelism (cp_size) without FSDP2")
    if sizes.get("sp_size", 1) > 1 and wrapper is not Wrapper.DEEPSPEED:
        raise NotPredicted("sequence parallelism (sp_size) without DeepSpeed")
    if sizes.get("tp_size", 1) > 1 and wrapper is not Wrapper.TENSOR_PARALLEL:
        other = "DeepSpeed" if wrapper is Wrapper.DEEPSPEED else "FSDP"
        raise NotPredicted(f"tensor parallelism (tp_size) with {other}: {_ALONE}")


def _check_tensors(request: PlanRequest, kind: Kind) -> None:
    """Refuse to divide a model that is not built here, or among only some of the cards."""
    num_cards, source = kind.sizes["tp_size"], request.source
    _refuse_quantised(request, kind, "tensor parallelism")
    what = f"tensor parallelism (tp_size {num_cards})"
    if not isinstance(source, ConfigSource):
        raise NotPredicted(f"{what} of a Trainer: plan its config instead")
    if source.trainer is not None:
        raise NotPredicted(f"{what} with --trainer {source.trainer}")
    if kind.is_streamed:
        raise NotPredicted("a base that is streamed, under tensor parallelism")
    if request.num_gpus != num_cards:
        raise PlanError(
            f"tp_size is {num_cards}, and there are {request.num_gpus} GPUs: without other groups "
            "of cards the two have to be equal"
        )


def refuse_parallelism(sizes: Mapping[str, object], where: str) -> None:
    """Refuse cards that share the tensors of a model, and something else with other cards."""
    if (size := sizes.get("tp_size")) in (None, 1):
        return
    others = [f"{name} {sizes[name]}" for name in _OTHER_SIZES if sizes.get(name) not in (None, 1)]
    if others:
        raise NotPredicted(
            f"tensor parallelism (tp_size {size} in {where}) with {', '.join(others)}: {_ALONE}"
        )


def _refuse_quantised(request: PlanRequest, kind: Kind, by: str) -> None:
    if kind.is_quantised and isinstance(request.source, ConfigSource):
        raise NotPredicted(
            f"a quantised base under {by}, on fake tensors: --engine dry runs it without a card"
        )


def _refuse_other_batches(request: PlanRequest, args: HfArguments) -> None:
    """Refuse settings that change the micro-batch of a rank."""
    if request.num_gpus <= 1:
        return
    loading, rows = args.accelerator_config, args.per_device_train_batch_size
    if loading.split_batches:
        if rows % request.num_gpus:
            raise PlanError(
                f"split_batches cannot divide {rows} rows among {request.num_gpus} GPUs"
            )
        raise NotPredicted("split_batches (accelerator_config)")
    if loading.dispatch_batches:
        raise NotPredicted("dispatch_batches (accelerator_config)")
