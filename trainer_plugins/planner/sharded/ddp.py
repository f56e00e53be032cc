"""DDP: torch's own reducer, on tensors without bytes. Imports torch.

Buckets are made by torch's C++ (torch/csrc/distributed/c10d/reducer.cpp) and seen as any other
memory: in the first step one for the whole model, or those of the limits where unused parameters
are looked for; from the second step on those of the order in which gradients were ready.
"""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from trainer_plugins.planner.request import PlanRequest
from trainer_plugins.planner.sharded.ranks import OF_NCCL, as_first_rank
from trainer_plugins.planner.tracing.trace import Tracker

aten = torch.ops.aten
dist: Any = torch.distributed  # its C++ is in no stub


class Ddp:
    """Everything on each card, and gradients once more, in buckets."""

    not_predicted: tuple[str, ...] = (OF_NCCL,)
    not_reliable: tuple[str, ...] = (
        "DDP: buckets are those of torch's own reducer; checked against it on CPU, and against nobody's GPU",
    )

    def __init__(self, request: PlanRequest) -> None:
        self._request = request

    @contextlib.contextmanager
    def around(self, tracker: Tracker) -> Iterator[None]:
        with as_first_rank(self._request, tracker) as stack, _ReducerCounts() as counts:
            stack.enter_context(
                patch.object(dist.Logger, "set_runtime_stats_and_log", lambda logger: None)
            )  # timers
            # It reads the sizes that other ranks send; here they are this one's.
            stack.enter_context(
                patch.object(
                    torch.nn.parallel.distributed,
                    "_verify_param_shape_across_processes",
                    lambda *_, **__: None,
                )
            )
            rebuild = dist.Reducer._rebuild_buckets
            build: Any = DistributedDataParallel._ddp_init_helper

            def rebuilt(reducer: Any) -> Any:
                with tracker.as_category("sharding buffers"), counts.while_rebuilding():
                    return rebuild(reducer)

            def built(ddp: Any, parameters: Any, *args: Any, **kwargs: Any) -> None:
                counts.num_parameters = len(parameters)
                with tracker.as_category("sharding buffers"):
                    build(ddp, parameters, *args, **kwargs)
                dist._register_comm_hook(ddp.reducer, None, _reduced)

            stack.enter_context(patch.object(dist.Reducer, "_rebuild_buckets", rebuilt))
            stack.enter_context(patch.object(DistributedDataParallel, "_ddp_init_helper", built))
            yield

    def prepare(self, trainer: Any) -> None:
        pass

    def host_pinned_bytes_per_node(self) -> int:
        return 0


def _reduced(_: Any, bucket: Any) -> Any:
    """What the default does, whose result the fake group of processes does not have: the bucket, reduced in place."""
    future: Any = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


class _ReducerCounts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives the reducer bytes for what it reads itself: the order of its buckets, and which parameters were used.

    Both are lists of int32 on the host (reducer.cpp, sync_bucket_indices and
    all_reduce_local_used_map).
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

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [each for each in args if isinstance(each, torch.Tensor)]
        if self._makes_a_list(func, args, kwargs) or (
            given and all(_is_list(each) for each in given)
        ):
            if func is aten.is_pinned.default:
                return True  # it insists, and a machine without a card pins nothing
            with _disable_current_modes():
                return func(
                    *args, **{name: value for name, value in kwargs.items() if name != "pin_memory"}
                )
        if func is aten.copy_.default and _is_list(args[0]):
            return args[0]  # what comes back from the other ranks is what was sent
        return func(*args, **kwargs)

    def _makes_a_list(self, func: Any, args: Any, kwargs: Any) -> bool:
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
