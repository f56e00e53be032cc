"""Watch a run on tensors without bytes: one event for each storage that is made, and one for each that dies.

Imports torch.
"""

import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from trainer_plugins.planner import progress
from trainer_plugins.planner.tracing import kernels
from trainer_plugins.planner.tracing.graph import Graph
from trainer_plugins.planner.tracing.in_place import IN_PLACE, is_autograds_own

ALLOC, FREE, EMPTY_CACHE, BEGIN = 1, -1, 0, 2

_ALL_OF_A_MASK = "aten::all of a mask"
_MASK_DIMENSIONS = 2  # rows, and tokens


@dataclass(slots=True)
class Storage:
    """One allocation of the run.

    Its category may be told later: what a gradient is, is known after the backward.
    """

    num_bytes: int
    stream: int
    moment: str
    operation: str
    module: str
    category: str
    shape: tuple[int, ...]
    dtype: str


class Event(NamedTuple):
    """`ALLOC` or `FREE` of `Trace.storages[number]`; or, with the number -1, `EMPTY_CACHE`, or a moment's `BEGIN`."""

    kind: int
    number: int
    moment: str


@dataclass(frozen=True, slots=True)
class Trace:
    """One card's events, in their order."""

    storages: tuple[Storage, ...]
    events: tuple[Event, ...]
    host_peaks: Mapping[str, int] = field(default_factory=dict)
    """By moment the most bytes of tensors in a node's main memory."""

    @property
    def host_peak_bytes(self) -> int:
        """The most of all."""
        return max(self.host_peaks.values(), default=0)


class Tracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the storages of one device type, real or fake.

    Args:
        device: the device type that stands for the card.
        card: what its kernels need while they run (see `kernels`); None counts results only.
        has_padding: whether there is a 0 in the masks of batches, when somebody asks.
    """

    def __init__(
        self, device: str, card: kernels.KernelRules | None, has_padding: bool = False
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device
        self.moment = "load"
        self.module = ""
        """The module that is running."""

        self.graph = Graph()
        """Which module a node of the backward comes from."""

        self.stream = 0
        """The stream in whose pool memory is taken; who runs work on another one sets it around that."""

        self.category: str | None = None
        """What everything is that is made now; None where that is found out."""

        self.host_ranks = 1
        """How many processes of a node do on the host what this one does."""

        self.vocabulary = -1
        """The last dimension by which logits are known."""

        self.paused = False
        self.fake_mode: Any = None
        self.scalars_answered: dict[str, int] = {}
        self.checks_hold = True
        """The answer to `all`, but for that of a batch's mask."""

        self.masks_pick_all = False
        """Whether something was picked by a mask, whose ones nobody can count here."""

        self.allocated_bytes = 0
        self._card = card
        self._has_padding = has_padding
        self._storages: list[Storage] = []
        self._events: list[Event] = []
        self._known: dict[int, tuple[weakref.ref[Any], list[int]]] = {}
        self._host_bytes: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._host_truths: dict[int, str] = {}
        """By storage on the host that holds one bool, what has made it."""

        self._host_now = 0
        self._host_peaks: dict[str, int] = {}
        self._pinned: set[int] = set()
        self._pinned_now = 0
        self.pinned_peak_bytes = 0
        """Of a node's main memory, what is pinned."""

        self._workspaces: set[tuple[int, str]] = set()

    def trace(self) -> Trace:
        """Everything so far."""
        return Trace(tuple(self._storages), tuple(self._events), dict(self._host_peaks))

    @contextmanager
    def during(self, moment: str) -> Iterator[None]:
        """Name the moment of what happens inside."""
        before, self.moment = self.moment, moment
        progress.step(f"rehearsing the {moment}")
        self._events.append(Event(BEGIN, -1, moment))  # it may allocate nothing
        try:
            yield
        finally:
            self.moment = before

    @contextmanager
    def as_category(self, category: str) -> Iterator[None]:
        """Say what all is that is made inside."""
        before, self.category = self.category, category
        try:
            yield
        finally:
            self.category = before

    def tag(self, tensors: Iterable[Any], category: str) -> None:
        """Say what the storages of these tensors are."""
        for tensor in tensors:
            storage = self.storage_of(tensor)
            if storage is not None:
                storage.category = category

    def storage_of(self, tensor: Any) -> Storage | None:
        """The record of a tensor's storage, None where it is not on the card."""
        if not isinstance(tensor, torch.Tensor) or tensor.device.type != self.device:
            return None
        entry = self._known.get(_key(_local(tensor).untyped_storage()))
        return self._storages[entry[1][0]] if entry else None

    def see(self, tensor: Any, operation: str) -> None:
        """Count a tensor's storage unless it has been."""
        tensor = _local(tensor)
        kind = tensor.device.type
        if (
            self.fake_mode is not None
            and isinstance(tensor, FakeTensor)
            and tensor.fake_mode is not self.fake_mode
        ):
            return  # a shape that DTensor works out with tensors of its own
        if kind == "cpu":
            self._see_host(tensor)
        elif kind == self.device:
            storage = tensor.untyped_storage()
            entry = self._known.get(_key(storage))
            if entry is None:
                index = self._alloc(storage.nbytes(), operation, tensor)
                self._remember(storage, index)
            elif self._storages[entry[1][0]].num_bytes != storage.nbytes():
                self.resized(storage)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """A storage has another size than before: to the allocator that is a free, and an allocation."""
        entry = self._known.get(_key(storage))
        if entry is None:
            return
        before = self._storages[entry[1][0]]
        if before.num_bytes != storage.nbytes():
            self._free(entry[1][0])
            entry[1][0] = self._alloc(storage.nbytes(), before.operation, None, like=before)

    def transient(self, num_bytes: int, operation: str) -> None:
        """What a kernel takes from the allocator while it runs."""
        if num_bytes > 0:
            self._free(self._alloc(num_bytes, operation, None, category="workspaces"))

    def keep_workspace(self, num_bytes: int, operation: str) -> None:
        """What a library takes at its first use, and keeps."""
        self._alloc(num_bytes, operation, None, category="workspaces")

    def pin(self, tensor: Any) -> None:
        """Say that a tensor on the host is pinned: it takes a power of two, ATen/core/CachingHostAllocator.h."""
        key = _key(tensor.untyped_storage())
        if key in self._pinned or key not in self._host_bytes:
            return
        reference, before = self._host_bytes[key]
        after = (1 << max(0, tensor.untyped_storage().nbytes() - 1).bit_length()) * self.host_ranks
        self._host_bytes[key] = (reference, after)
        self._pinned.add(key)
        self._pinned_now += after
        self._host_now += after - before
        self._host_peaks[self.moment] = max(self._host_peaks.get(self.moment, 0), self._host_now)
        self.pinned_peak_bytes = max(self.pinned_peak_bytes, self._pinned_now)

    def is_pinned(self, tensor: Any) -> bool:
        """Whether `pin` was told."""
        return _key(tensor.untyped_storage()) in self._pinned

    def emptied(self) -> None:
        """The cache was given back by the program."""
        self._events.append(Event(EMPTY_CACHE, -1, self.moment))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # half of all calls; the way through the mode below is long
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # it calls again for what happens on this rank
        if self.paused:
            return func(*args, **kwargs)
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            answer = self._scalar(args[0])
            if answer is not None:
                return answer
        if func is torch.ops.aten.equal.default and isinstance(args[0], FakeTensor):
            return True
        if func in IN_PLACE and is_autograds_own(args[0]):
            func = IN_PLACE[func]
        if self._card is not None:
            self._use_kernels(func, args)
        self.masks_pick_all = self.masks_pick_all or kernels.picks_by_mask(func, args)
        result = kernels.run(func, args, kwargs)
        name = func._schema.name
        if isinstance(result, torch.Tensor):
            self._see_result(result, name, args)
        elif isinstance(result, (tuple, list)):
            for item in result:
                for tensor in item if isinstance(item, (tuple, list)) else (item,):
                    if isinstance(tensor, torch.Tensor):
                        self._see_result(tensor, name, args)
        if (
            self._card is not None
        ):  # a kernel takes what it needs beside its results, not before them
            self.transient(self._card.transient_bytes(func, args), name)
        return result

    # What follows is bookkeeping.

    def _see_result(self, tensor: torch.Tensor, name: str, args: Any) -> None:
        before = len(self._storages)
        self.see(tensor, name)
        if tensor.dtype == torch.bool and tensor.numel() == 1 and tensor.device.type == "cpu":
            self._host_truths[_key(_local(tensor).untyped_storage())] = name
        if len(self._storages) == before:
            return
        storage = self._storages[-1]
        if name == "aten::all" and args[0].ndim == _MASK_DIMENSIONS:
            storage.operation = _ALL_OF_A_MASK
        if name == "aten::_to_copy" and args:
            source = self.storage_of(args[0])
            if source is not None and source.category in ("weights", "frozen weights"):
                storage.category = "autocast copies of weights"

    def _use_kernels(self, func: Any, args: Any) -> None:
        assert self._card is not None
        for library, num_bytes in self._card.workspaces(func, args):
            used = (
                threading.get_ident(),
                library,
            )  # each thread has a handle, and a workspace with it
            if args[-1].device.type == self.device and used not in self._workspaces:
                self._workspaces.add(used)
                self.keep_workspace(num_bytes, library)

    def _alloc(
        self,
        num_bytes: int,
        operation: str,
        tensor: Any,
        category: str | None = None,
        like: Storage | None = None,
    ) -> int:
        shape = tuple(tensor.shape) if tensor is not None else ()
        if like is not None:
            record = Storage(
                num_bytes,
                self.stream,
                self.moment,
                operation,
                like.module,
                like.category,
                like.shape,
                like.dtype,
            )
        else:
            dtype = str(tensor.dtype).removeprefix("torch.") if tensor is not None else "bytes"
            category = category or self.category
            if category is None:
                is_logits = (
                    len(shape) >= 2 and shape[-1] == self.vocabulary and self.moment != "load"
                )
                category = "logits and loss" if is_logits else "activations"
            module = self.module or self.graph.module_running()
            record = Storage(
                num_bytes, self.stream, self.moment, operation, module, category, shape, dtype
            )
        self._storages.append(record)
        index = len(self._storages) - 1
        if num_bytes:
            self._events.append(Event(ALLOC, index, self.moment))
            self.allocated_bytes += num_bytes
        return index

    def _free(self, index: int) -> None:
        if self._storages[index].num_bytes:
            self._events.append(Event(FREE, index, self.moment))
            self.allocated_bytes -= self._storages[index].num_bytes

    def _remember(self, storage: torch.UntypedStorage, index: int) -> None:
        key, current = _key(storage), [index]

        def died(_: Any) -> None:
            self._free(current[0])
            self._known.pop(key, None)

        self._known[key] = (weakref.ref(storage, died), current)

    def _see_host(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = _key(storage)
        if key in self._host_bytes:
            return

        def died(_: Any) -> None:
            num_bytes = self._host_bytes.pop(key)[1]
            self._host_truths.pop(key, None)
            self._host_now -= num_bytes
            if key in self._pinned:
                self._pinned.remove(key)
                self._pinned_now -= num_bytes

        num_bytes = storage.nbytes() * self.host_ranks
        self._host_bytes[key] = (weakref.ref(storage, died), num_bytes)
        self._host_now += num_bytes
        self._host_peaks[self.moment] = max(self._host_peaks.get(self.moment, 0), self._host_now)

    def _scalar(self, tensor: FakeTensor) -> bool | float | int | None:
        """Answer what only a real run knows as a healthy run would: nothing is NaN, every check holds, a loss is 1."""
        if getattr(tensor, "constant", None) is not None:
            return None
        made_by = self.storage_of(tensor)
        operation = (
            made_by.operation
            if made_by is not None
            else self._host_truths.get(_key(tensor.untyped_storage()), "")
        )
        self.scalars_answered[operation] = self.scalars_answered.get(operation, 0) + 1
        if operation == _ALL_OF_A_MASK:
            return not self._has_padding
        if operation == "aten::all":
            return self.checks_hold
        if tensor.dtype == torch.bool:
            return operation not in (
                "aten::isnan",
                "aten::isinf",
                "aten::any",
                "aten::ne",
                "aten::lt",
            )
        if tensor.dtype.is_floating_point:
            # GradScaler asks before the optimizer steps whether it found infinities; a count of
            # steps lies on the host.
            return 0.0 if self.moment == "optimizer step" and made_by is not None else 1.0
        return 1


def _key(storage: torch.UntypedStorage) -> int:
    return int(storage._cdata)


def _local(tensor: Any) -> Any:
    return getattr(tensor, "_local_tensor", tensor)
