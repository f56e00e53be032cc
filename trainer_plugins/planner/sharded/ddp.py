"""Run DDP by torch's own reducer, on tensors without bytes. Imports torch.

torch's C++ makes the buckets (torch/csrc/distributed/c10d/reducer.cpp), and they are counted like
any other memory. In the first step there is one bucket for the whole model, or buckets of the size
limits if unused parameters are searched for. From the second step on, they follow the order in
which gradients were ready.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from trainer_plugins.planner.request import PlanRequest
from trainer_plugins.planner.sharded.ranks import OF_NCCL, as_first_rank
from trainer_plugins.planner.tracing.kernels import Operator, OperatorArgs, OperatorKwargs
from trainer_plugins.planner.tracing.trace import Tracker
from trainer_plugins.planner.trainer import TrainerLike

aten = torch.ops.aten
dist: Any = torch.distributed  # its C++ is in no stub


class Ddp:
    """Keeps everything on each card, and the gradients once more, in buckets."""

    not_predicted: tuple[str, ...] = (OF_NCCL,)
    not_reliable: tuple[str, ...] = (
        "DDP: torch's own reducer makes the buckets; checked on CPU, not on a GPU",
    )

    def __init__(self, request: PlanRequest) -> None:
        self._request = request

    @contextlib.contextmanager
    def around(self, tracker: Tracker) -> Iterator[None]:
        with as_first_rank(self._request, tracker) as stack, _ReducerCounts() as counts:
            # it reads timers of the card
            stack.enter_context(
                patch.object(dist.Logger, "set_runtime_stats_and_log", lambda logger: None)
            )
            # it reads the sizes that other ranks send; here they are those of this rank
            stack.enter_context(
                patch.object(
                    torch.nn.parallel.distributed,
                    "_verify_param_shape_across_processes",
                    lambda *_, **__: None,
                )
            )
            rebuild = dist.Reducer._rebuild_buckets
            build: Callable[..., None] = DistributedDataParallel._ddp_init_helper

            def rebuilt(reducer: object) -> object:
                with tracker.as_category("sharding buffers"), counts.while_rebuilding():
                    return rebuild(reducer)

            def built(
                ddp: Any, parameters: Sequence[torch.Tensor], *args: object, **kwargs: object
            ) -> None:
                counts.num_parameters = len(parameters)
                with tracker.as_category("sharding buffers"):
                    build(ddp, parameters, *args, **kwargs)
                dist._register_comm_hook(ddp.reducer, None, _reduced)

            stack.enter_context(patch.object(dist.Reducer, "_rebuild_buckets", rebuilt))
            stack.enter_context(patch.object(DistributedDataParallel, "_ddp_init_helper", built))
            yield

    def prepare(self, trainer: TrainerLike) -> None:
        pass


def _reduced(_: object, bucket: Any) -> torch.futures.Future[object]:
    """Return the bucket as reduced in place, like the default hook.

    The default hook needs a result that the fake group of processes does not have.
    """
    future: torch.futures.Future[object] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


class _ReducerCounts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives the reducer real bytes for the lists that it reads itself.

    These are the order of its buckets and which parameters were used, both of int32 on the host
    (reducer.cpp, sync_bucket_indices and all_reduce_local_used_map).
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_parameters = -1
        self._is_rebuilding = False

    @contextlib.contextmanager
    def while_rebuilding(self) -> Iterator[None]:
        self._is_rebuilding = True
        try:
            yield
        finally:
            self._is_rebuilding = False

    def __torch_dispatch__(
        self,
        func: Operator,
        types: Iterable[type],
        args: OperatorArgs = (),
        kwargs: OperatorKwargs | None = None,
    ) -> object:
        kwargs = kwargs or {}
        given = [each for each in args if isinstance(each, torch.Tensor)]
        if self._makes_a_list(func, args, kwargs) or (
            given and all(_is_list(each) for each in given)
        ):
            if func is aten.is_pinned.default:
                return True  # the reducer insists, and nothing is pinned without a card
            with _disable_current_modes():
                return func(
                    *args, **{name: value for name, value in kwargs.items() if name != "pin_memory"}
                )
        if func is aten.copy_.default and _is_list(args[0]):
            return args[0]  # the other ranks send back what they got
        return func(*args, **kwargs)

    def _makes_a_list(self, func: Operator, args: OperatorArgs, kwargs: OperatorKwargs) -> bool:
        return (
            func in (aten.zeros.default, aten.empty.memory_format, aten.empty_strided.default)
            and kwargs.get("dtype") is torch.int32
            and getattr(kwargs.get("device"), "type", "cpu") == "cpu"
            and (self._is_rebuilding or [*args[0]] == [self.num_parameters])
        )


def _is_list(tensor: torch.Tensor) -> bool:
    return (
        not isinstance(tensor, FakeTensor)
        and tensor.dtype is torch.int32
        and tensor.device.type == "cpu"
    )
