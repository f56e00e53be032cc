"""How work is divided among cards.

A strategy surrounds the rehearsal, which is then that of one rank of many.
"""

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol

from trainer_plugins.planner.plan import NotPredicted, PlanError
from trainer_plugins.planner.request import PlanRequest
from trainer_plugins.planner.sharded.zero_config import read_config
from trainer_plugins.planner.tracing.trace import Tracker


class Strategy(Protocol):
    """What a division of work changes."""

    not_predicted: tuple[str, ...]
    """What such a run does that its figures leave out."""

    not_reliable: tuple[str, ...]
    """What to tell the reader about its figures."""

    def around(self, tracker: Tracker) -> contextlib.AbstractContextManager[None]:
        """Be in force while the Trainer is built and runs."""

    def prepare(self, trainer: Any) -> None:
        """Look at the Trainer before it runs.

        Raises:
            NotPredicted: it cannot be divided so.
        """

    def host_pinned_bytes_per_node(self) -> int:
        """Pinned memory of all ranks of one node."""


class SingleGpu:
    """Everything on one card."""

    not_predicted: tuple[str, ...] = ()
    not_reliable: tuple[str, ...] = ()

    @contextlib.contextmanager
    def around(self, tracker: Tracker) -> Iterator[None]:
        yield

    def prepare(self, trainer: Any) -> None:
        pass

    def host_pinned_bytes_per_node(self) -> int:
        return 0


def strategy_of(request: PlanRequest, args: Any) -> Strategy:
    """Choose by what the launch and the arguments ask for.

    Raises:
        PlanError: what they ask for contradicts itself.
        NotPredicted: there is no strategy here for it.
    """
    _refuse_other_batches(request, args)
    deepspeed = (
        getattr(args, "deepspeed", None) or request.deepspeed
    )  # the Trainer's arguments go before a launcher's
    if deepspeed is not None:
        from trainer_plugins.planner.sharded.zero import zero_strategy

        return zero_strategy(read_config(deepspeed), request, args)
    several = request.num_gpus > 1 or request.environment.get("ACCELERATE_USE_FSDP") == "true"
    if several and request.device != "cuda":
        raise NotPredicted(f"several ranks on {request.device}")
    if getattr(args, "fsdp", None) or request.environment.get("ACCELERATE_USE_FSDP") == "true":
        from trainer_plugins.planner.sharded.fsdp2 import Fsdp2

        return Fsdp2(request)
    if request.num_gpus > 1:
        from trainer_plugins.planner.sharded.ddp import Ddp

        return Ddp(request)
    return SingleGpu()


def _refuse_other_batches(request: PlanRequest, args: Any) -> None:
    """Of what makes the micro-batch of a rank another one than its arguments say."""
    if getattr(args, "parallelism_config", None) is not None:
        raise NotPredicted("tensor, context and replicated parallelism (parallelism_config)")
    loading, rows = args.accelerator_config, args.per_device_train_batch_size
    if request.num_gpus > 1 and loading.split_batches:
        if rows % request.num_gpus:
            raise PlanError(
                f"split_batches cannot divide {rows} rows among {request.num_gpus} GPUs"
            )
        raise NotPredicted("split_batches (accelerator_config)")
    if request.num_gpus > 1 and loading.dispatch_batches:
        raise NotPredicted("dispatch_batches (accelerator_config)")
