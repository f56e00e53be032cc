"""Run DDP by torch's own reducer (torch/csrc/distributed/c10d/reducer.cpp), without bytes."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from trainer_plugins.patched import Patches
from trainer_plugins.planner.sharded.ranks import Ranks, makes_buffers
from trainer_plugins.planner.tracing.kernels import Operator, OperatorArgs, OperatorKwargs
from trainer_plugins.planner.tracing.trace import Tracker

aten = torch.ops.aten
dist: Any = torch.distributed  # its C++ is in no stub


class Ddp(Ranks):
    """Keeps everything on each card, and a second copy of the gradients, in buckets."""

    not_reliable = ("DDP: torch's own reducer makes the buckets; checked on CPU, not on a GPU",)

    def patch(self, patches: Patches, tracker: Tracker) -> None:
        counts = patches.enter_context(_ReducerCounts())
        # it reads timers of the card
        patches.set(dist.Logger, "set_runtime_stats_and_log", lambda logger: None)
        # It counts steps, of which torch 2.11 times the first ten by CUDA's own events.
        patches.set(dist.Reducer, "prepare_for_forward", lambda reducer: None)
        # it reads the sizes that other ranks send; here they are those of this rank
        name = "_verify_param_shape_across_processes"
        patches.set(torch.nn.parallel.distributed, name, lambda *_, **__: None)

        def rebuilt(rebuild: Callable[..., object], reducer: object) -> object:
            with tracker.as_category("sharding buffers"), counts.while_rebuilding():
                return rebuild(reducer)

        def built(
            build: Callable[..., None],
            ddp: Any,
            parameters: Sequence[torch.Tensor],
            *args: object,
            **kwargs: object,
        ) -> None:
            counts.num_parameters = len(parameters)
            with tracker.as_category("sharding buffers"):
                build(ddp, parameters, *args, **kwargs)
            dist._register_comm_hook(ddp.reducer, None, _reduced)

        module = torch.nn.parallel.distributed
        makes_buffers(patches, tracker, module, "_sync_module_states")  # rank 0's weights, at first
        patches.wrap(dist.Reducer, "_rebuild_buckets", rebuilt)
        patches.wrap(DistributedDataParallel, "_ddp_init_helper", built)


def _reduced(_: object, bucket: Any) -> torch.futures.Future[object]:
    """Return the bucket as reduced in place; the default hook needs results that are not here.

    DDP does not wait for the Work itself, so NCCL's group keeps its tensors: but only until the
    watchdog, which looks every 100 ms, has seen that it ended, and the next collective begins
    (ProcessGroupNCCL.cpp, shelvesToUnstash_). An optimizer step lies between.
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
        are_lists = bool(given) and all(_is_list(each) for each in given)
        if are_lists or self._makes_a_list(func, args, kwargs):
            if func is aten.is_pinned.default:
                return True  # the reducer insists, and nothing is pinned without a card
            kept = {name: value for name, value in kwargs.items() if name != "pin_memory"}
            with _disable_current_modes():
                return func(*args, **kept)
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
