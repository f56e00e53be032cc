"""Records a run on tensors without bytes: an event for each storage that is made or freed."""

import threading
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from trainer_plugins.planner import progress
from trainer_plugins.planner.plan import Category, Moment, known_category, known_moment
from trainer_plugins.planner.tracing import in_place, kernels, values
from trainer_plugins.planner.tracing.events import (
    ALLOC,
    BEGIN,
    EMPTY_CACHE,
    FREE,
    LEFT,
    Event,
    Storage,
    Trace,
)
from trainer_plugins.planner.tracing.host_tensors import HostMemory, key_of, makes_pinned
from trainer_plugins.planner.tracing.kernels import Operator, OperatorArgs, OperatorKwargs
from trainer_plugins.planner.tracing.position import Graph, Lag, Pace, Streams
from trainer_plugins.wrapped import local_tensor, tensors_in

_StorageRef: TypeAlias = "weakref.ref[torch.UntypedStorage]"


class Tracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the storages of one device type; `card` has what kernels take while they run."""

    def __init__(
        self, device: str, card: kernels.KernelRules | None, has_padding: bool = False
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device, self.has_padding = device, has_padding
        self.has_packed_rows = False  # of several texts each, whose positions begin again
        self.module = ""  # the module that is running, by its name in the model
        self.streams = Streams()
        self.vocabulary = -1  # the last dimension of logits, which tells them from other tensors
        self._is_resting = False  # whether operations are not counted now
        self.checks_hold = True  # the answer to `all`, except for a batch's mask
        self.fake_mode: FakeTensorMode | None = None
        self.scalars_answered: Counter[str] = Counter()  # by operation
        self.not_watched: tuple[str, ...] = ()  # functions that the installed versions lack
        self.masks_pick_all = False  # whether a mask, whose ones are unknown, picked something
        self.assumed: list[str] = []  # assumptions about values that cannot be known here
        self.allocated_bytes: Counter[int] = Counter()  # what each card holds now, by its index
        self.host, self.graph, self.lag, self.values = HostMemory(), Graph(), Lag(), values.Values()
        self._card, self._pace = card, Pace(self.graph)
        self._moment: Moment = "load"
        self._category: Category | None = None  # of what is made now; None: it depends
        # a backward on several cards has a thread for each, and FakeTensorMode a state for all
        self._one_at_a_time = threading.RLock()
        self._storages: list[Storage] = []
        self._events: list[Event] = []
        self._known: dict[int, tuple[_StorageRef, list[int]]] = {}
        self._read_elsewhere: set[int] = set()
        self._workspaces: set[tuple[int, str, int]] = set()

    @property
    def stream(self) -> int:
        """Return the number of the stream from whose pool memory is taken."""
        return self.streams.current()

    @property
    def moment(self) -> Moment:
        """Return the current moment of the run. Set it to go on to another."""
        return self._moment

    @moment.setter
    def moment(self, moment: Moment) -> None:
        self._moment = known_moment(moment)

    def trace(self) -> Trace:
        """Return all events so far."""
        return Trace(tuple(self._storages), tuple(self._events), dict(self.host.peaks))

    @contextmanager
    def during(self, moment: Moment) -> Iterator[None]:
        """Give this moment to all that happens inside the block."""
        before, self.moment = self.moment, moment
        progress.step(f"rehearsing the {moment}")
        self._events.append(Event(BEGIN, -1, moment))  # the moment may allocate nothing
        try:
            yield
        finally:
            self.moment = before

    @contextmanager
    def as_category(self, category: Category) -> Iterator[None]:
        """Give this category to every storage that is made inside the block."""
        before, self._category = self._category, known_category(category)
        try:
            yield
        finally:
            self._category = before

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Count no operation inside the block."""
        self._is_resting = True
        try:
            yield
        finally:
            self._is_resting = False

    def tag(self, tensors: Iterable[object], category: Category) -> None:
        """Give this category to the storages of tensors; other objects are ignored."""
        known_category(category)
        for tensor in tensors:
            storage = self.storage_of(tensor)
            if storage is not None:
                storage.category = category

    def storage_of(self, tensor: object) -> Storage | None:
        """Return the record of a tensor's storage; None if it is not on the card."""
        if not isinstance(tensor, torch.Tensor) or tensor.device.type != self.device:
            return None
        entry = self._known.get(key_of(local_tensor(tensor).untyped_storage()))
        return self._storages[entry[1][0]] if entry else None

    def see(self, tensor: torch.Tensor, operation: str) -> None:
        """Count the storage of a tensor, unless it was counted before."""
        tensor = local_tensor(tensor)
        kind = tensor.device.type
        if (
            self.fake_mode is not None
            and isinstance(tensor, FakeTensor)
            and tensor.fake_mode is not self.fake_mode
        ):
            return  # DTensor infers shapes with fake tensors of its own
        if kind == "cpu":
            self.host.see(tensor.untyped_storage(), self.moment)
        elif kind == self.device:
            storage = tensor.untyped_storage()
            if key_of(storage) in self._known:
                self.resized(storage)
            else:
                self._remember(storage, self._alloc(self._described(tensor, operation)))

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Count the new size of a storage: to the allocator that is a free and an allocation."""
        entry = self._known.get(key_of(storage))
        if entry is None:
            return
        before = self._storages[entry[1][0]]
        if before.num_bytes != storage.nbytes():
            self._free(entry[1][0])
            entry[1][0] = self._alloc(
                replace(before, num_bytes=storage.nbytes(), stream=self.stream, moment=self.moment)
            )

    def transient(self, sizes: Iterable[int], operation: str, card: int = 0) -> None:
        """Count what a kernel takes from a card while it runs, each size in bytes."""
        made = [self.keep_workspace(size, operation, card) for size in sizes if size]
        for each in reversed(made):  # as C++ leaves its variables
            self._free(each)

    def keep_workspace(self, num_bytes: int, operation: str, card: int = 0) -> int:
        """Count bytes that a library takes of a card and keeps; return the storage's number."""
        module = self.module or self.graph.module_running()
        return self._alloc(
            Storage(
                num_bytes,
                self.stream,
                self.moment,
                operation,
                module,
                "workspaces",
                (),
                "bytes",
                card,
            )
        )

    def emptied(self) -> None:
        """Note that the program emptied the cache."""
        self._events.append(Event(EMPTY_CACHE, -1, self.moment))

    def read_by(self, tensor: torch.Tensor, stream: int) -> None:
        """Note another stream that reads a tensor; until then its block cannot be used again."""
        entry = self._known.get(key_of(tensor.untyped_storage()))
        if entry is not None and self._storages[entry[1][0]].stream != stream:
            self._read_elsewhere.add(entry[1][0])

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: OperatorArgs = (),
        kwargs: OperatorKwargs | None = None,
    ) -> object:
        with self._one_at_a_time:
            self._pace.count(self.moment, self.module)
            return self._dispatched(func, types, args, kwargs or {})

    def _dispatched(
        self, func: Any, types: Iterable[type], args: OperatorArgs, kwargs: OperatorKwargs
    ) -> object:
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # half of all calls; the mode below would be slow
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # DTensor calls again with the operations of this rank
        if self._is_resting:
            return func(*args, **kwargs)
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            answer = self._scalar(args[0])
            if answer is not None:
                return answer
        if func is torch.ops.aten.equal.default and isinstance(args[0], FakeTensor):
            return True
        if func is torch.ops.aten.is_pinned.default:
            return self.host.is_pinned(args[0])
        if func in in_place.IN_PLACE and in_place.is_autograds_own(args[0]):
            func = in_place.IN_PLACE[func]
        source = self.storage_of(args[0]) if func.is_view else None
        is_away = source is not None and not source.num_bytes  # the bytes of a streamed weight
        args = self.values.counted(func, args)
        self.masks_pick_all = self.masks_pick_all or kernels.picks_by_mask(func, args)
        result = self.values.run(func, args, kwargs)
        if is_away:  # FakeTensorMode makes the view by `set_`, which lets the storage grow
            local_tensor(args[0]).untyped_storage().resize_(0)
        name = func._schema.name
        copies = self._card.copies(func, args) if self._card is not None else []
        copied = [self.keep_workspace(size, name, _card_of(args[0])) for size in copies]
        if isinstance(result, torch.Tensor) and makes_pinned(func, args, kwargs):
            self.host.pin(result.untyped_storage(), self.moment)
        made = [*tensors_in(result)]
        for tensor in made if self._card is None else self._card.in_turn(func, made):
            self._see_result(tensor, name, args)
        if self._card is not None:  # a kernel allocates its results before these
            self._use_workspaces(func, args)
            if sizes := self._card.transients(func, args):
                self.transient(sizes, name, _card_of(next(iter(tensors_in(args)))))
        for each in copied:
            self._free(each)
        return result

    def _see_result(self, tensor: torch.Tensor, name: str, args: OperatorArgs) -> None:
        before = len(self._storages)
        self.see(tensor, name)
        if tensor.dtype == torch.bool and tensor.numel() == 1 and tensor.device.type == "cpu":
            self.host.note_truth(local_tensor(tensor).untyped_storage(), name)
        if len(self._storages) == before:
            return
        storage = self._storages[-1]
        source = self.storage_of(args[0]) if args else None
        storage.operation = values.name_of(name, args, source)
        is_weight = source is not None and source.category in ("weights", "frozen weights")
        if name == "aten::_to_copy" and is_weight:
            storage.category = "autocast copies of weights"

    def _use_workspaces(self, func: Operator, args: OperatorArgs) -> None:
        assert self._card is not None
        for library, num_bytes in self._card.workspaces(func, args):
            # each thread has its own handle for each card, and a workspace with it
            card = _card_of(args[1])
            used = (threading.get_ident(), library, card)
            if args[1].device.type == self.device and used not in self._workspaces:
                self._workspaces.add(used)
                self.keep_workspace(num_bytes, library, card)

    def _described(self, tensor: torch.Tensor, operation: str) -> Storage:
        """Describe the storage of a new tensor on the card."""
        shape = tuple(tensor.shape)
        category = self._category
        if category is None:
            is_wide = len(shape) >= 2 and shape[-1] == self.vocabulary
            category = "logits and loss" if is_wide else "activations"
            if self.moment == "load":
                category = "weights"
        return Storage(
            num_bytes=tensor.untyped_storage().nbytes(),
            stream=self.streams.adding() if operation == "aten::add" else self.stream,
            moment=self.moment,
            operation=operation,
            module=self.module or self.graph.module_running(),
            category=category,
            shape=shape,
            dtype=str(tensor.dtype).removeprefix("torch."),
            card=_card_of(tensor),
        )

    def _alloc(self, record: Storage) -> int:
        self._storages.append(record)
        index = len(self._storages) - 1
        if record.num_bytes:
            self._events.append(Event(ALLOC, index, self.moment))
            self.allocated_bytes[record.card] += record.num_bytes
        return index

    def _free(self, index: int) -> None:
        record = self._storages[index]
        if not record.num_bytes:
            return
        self.allocated_bytes[record.card] -= record.num_bytes
        if index not in self._read_elsewhere:
            self._events.append(Event(FREE, index, self.moment))
            return
        self._events.append(Event(LEFT, index, self.moment))
        self.lag.later(lambda: self._events.append(Event(FREE, index, self.moment)))

    def _remember(self, storage: torch.UntypedStorage, index: int) -> None:
        key, current = key_of(storage), [index]

        def died(_: object) -> None:
            self._free(current[0])
            self._known.pop(key, None)

        self._known[key] = (weakref.ref(storage, died), current)

    def _scalar(self, tensor: FakeTensor) -> Any:
        """Answer a question for a value as a healthy run would; None leaves it to torch."""
        if tensor.constant is not None:
            return None
        self.lag.finish(self.lag.mark())
        made_by = self.storage_of(tensor)
        if made_by is not None:
            operation = made_by.operation
        else:
            operation = self.host.truth_of(tensor.untyped_storage())
        self.scalars_answered[operation] += 1
        if operation == values.ALL_OF_A_MASK:
            return not self.has_padding
        if (told := self.values.told(tensor)) is not None:
            return told
        if operation == "aten::all":
            return self.checks_hold
        is_on_card = made_by is not None
        return values.healthy_answer(
            operation, tensor.dtype, self.moment, is_on_card, self.values.asked
        )


def _card_of(tensor: torch.Tensor) -> int:
    return tensor.device.index or 0
