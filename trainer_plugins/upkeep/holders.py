"""Counts live tensors on a device, and finds the holders of those without a known owner."""

import gc
import os
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from traceback import walk_tb
from types import CellType, FrameType, FunctionType, ModuleType
from typing import Any, TypeVar

import torch
from torch import nn

from trainer_plugins.devices import Device
from trainer_plugins.finding import Finding
from trainer_plugins.launch.masked import mask_text
from trainer_plugins.reading import MemoryReading
from trainer_plugins.record.oom_record import Alive, Held, LiveModel
from trainer_plugins.units import size
from trainer_plugins.upkeep.stack import is_of_project
from trainer_plugins.wrapped import local_tensor

T = TypeVar("T")

GROWTH_FRACTION = 0.01  # fraction of the card that may stay allocated before we look for holders

_MAX_LINKS = 6
_MOST_HELD = 5
_MOST_LARGEST = 3
_MOST_MODULES = 12
_MOST_MODELS = 6
_UNKNOWN = "nothing that Python tracks (autograd's graph, or C++)"
_HERE = os.path.dirname(__file__)


def leftover(device: Device, allocated_before_bytes: int | None) -> Finding | None:
    """Report an evaluation that left more allocated than it found, with the holders."""
    # On the CPU other code allocates memory too.
    if device.name == "cpu" or allocated_before_bytes is None:
        return None
    if device.read().allocated_bytes <= allocated_before_bytes:
        return None
    gc.collect()
    reading = device.read()
    grown_bytes = reading.allocated_bytes - allocated_before_bytes
    if grown_bytes < GROWTH_FRACTION * reading.total_bytes:
        return None
    held = tensors_held(reading.device.split(":")[0])
    return Finding.warning(
        code="evaluation-leftover",
        summary=f"an evaluation left {size(grown_bytes)} more allocated on {reading.device} than"
        " before",
        evidence="; ".join(f"{size(h.num_bytes)} {list(h.shape)} held by {h.holder}" for h in held)
        or "no holder found",
        remedy="Clear its holder when the evaluation ends, or move it off the card with .cpu().",
        amount=float(grown_bytes),
    )


def list_tracked(kind: type[T]) -> list[T]:
    """Return all objects of a class that Python tracks; takes 0.1 to 1 s."""
    # isinstance would ask other libraries' objects for their __class__.
    return [thing for thing in gc.get_objects() if issubclass(type(thing), kind)]


def root_modules() -> list[nn.Module]:
    """Return the live modules that are not part of another one."""
    modules = list_tracked(nn.Module)
    children = (child for module in modules for child in vars(module).get("_modules", {}).values())
    inner = {id(child) for child in children}
    return [module for module in modules if id(module) not in inner and "_modules" in vars(module)]


def storage_of(tensor: torch.Tensor, device_type: str) -> tuple[int, int] | None:
    """Return address and bytes of a tensor's storage; None if it has none on such a device."""
    tensor = local_tensor(tensor)  # a DTensor has no memory of its own
    try:
        if tensor.device.type != device_type:
            return None
        storage = tensor.untyped_storage()
        address, num_bytes = storage.data_ptr(), storage.nbytes()
    except (RuntimeError, NotImplementedError):  # a wrapper (torchao); we find the tensors inside
        return None
    return (address, num_bytes) if address else None


def tensors_held(device_type: str) -> list[Held]:
    """Return the largest tensors that no model and no optimizer owns, and their holders."""
    ledger, _ = _count_owned(device_type)
    others = ledger.others(with_graphs=True)
    del others[_MOST_LARGEST:]
    return name_holders(others)


def list_held(device_type: str, allocated_bytes: int) -> tuple[Held, ...]:
    """Return the largest allocations on a device with their holders: tensors, models, graphs."""
    if not allocated_bytes:
        return ()
    ledger, models = _count_owned(device_type)
    others = name_holders(ledger.others(with_graphs=True))
    held = [each for each in others if each.holder != _UNKNOWN]
    for model in models:
        holder = f"{model.holder} ({model.name})"
        held.append(Held(num_bytes=model.num_bytes, shape=(), holder=holder))
    hidden_bytes = allocated_bytes - sum(each.num_bytes for each in held)
    if hidden_bytes > allocated_bytes // 2 and (ends := graphs_held(device_type)):
        holders = ", ".join(dict.fromkeys(end.holder for end in ends))
        held.append(Held(num_bytes=hidden_bytes, shape=(), holder=f"the graph behind {holders}"))
    return tuple(sorted(held, key=lambda each: -each.num_bytes)[:_MOST_HELD])


def name_holders(tensors: list[torch.Tensor]) -> list[Held]:
    """Name the holder of each tensor, ignoring this list and the frames of this folder."""
    return [
        Held(
            num_bytes=tensor.untyped_storage().nbytes(),
            shape=tuple(tensor.shape),
            holder=_holder(tensor, tensors),
        )
        for tensor in tensors
    ]


def graphs_held(device_type: str, oldest: bool = False) -> list[Held]:
    """Return the ends of live autograd graphs, largest or oldest first, with their holders."""
    # During a step, which builds its own graph, the oldest are kept by other code.
    ends: list[Any] = [
        tensor
        for tensor in list_tracked(torch.Tensor)
        if tensor.grad_fn is not None and tensor.device.type == device_type
    ]
    inner: set[torch.autograd.graph.Node] = set()
    behind = [node for end in ends for node, _ in end.grad_fn.next_functions]
    while behind:
        node = behind.pop()
        if node is not None and node not in inner:
            inner.add(node)
            behind += [further for further, _ in node.next_functions]
    ends = [tensor for tensor in ends if tensor.grad_fn not in inner]
    # Autograd numbers the nodes of each thread.
    ends.sort(key=lambda end: end.grad_fn._sequence_nr() if oldest else -end.numel())
    del ends[_MOST_LARGEST:]
    return [
        Held(num_bytes=end.nbytes, shape=tuple(end.shape), holder=_holder(end, ends))
        for end in ends
    ]


def find_unowned(
    tensors: list[torch.Tensor], device_type: str, model: nn.Module | None, optimizer: object
) -> list[torch.Tensor]:
    """Return those on a device that are no parameter, buffer or state of a model and optimizer."""
    ledger = _Ledger(device_type)
    if model is not None:
        ledger.add_model(model)
    # accelerate's optimizer wrapper exposes the states of the one inside.
    ledger.add_optimizer(getattr(optimizer, "state", {}))
    places = ((each, storage_of(each, device_type)) for each in tensors)
    return [each for each, place in places if place is not None and place[0] not in ledger.counted]


def users_holder(thing: object, ours: object) -> str:
    """Follow holders to the first name in the user's code; empty if only a step's frames do."""
    found = _holder(thing, ours, until_users=True)
    return "" if found == _UNKNOWN or found.startswith(("[", "a local of")) else found


def _holder(thing: object, ours: object, until_users: bool = False) -> str:
    """Follow an object's holders up to a module, a frame, or a few names.

    A dictionary key may be a secret, so the result is masked.
    """
    text = ""
    seen = {id(ours), id(thing)}
    for _ in range(2 * _MAX_LINKS if until_users else _MAX_LINKS):
        owner, name = _owner(thing, seen)
        if owner is None:
            break
        text = name + (" -> " if text and not text.startswith("[") else "") + text
        if isinstance(owner, FrameType):
            owner = _error_through(owner)  # the frame may belong to an error that is kept
        if owner is None or isinstance(owner, ModuleType):
            break
        if until_users and (
            isinstance(owner, FunctionType)
            or is_of_project(type(owner))
            or (issubclass(type(owner), nn.Module) and "._" not in name)
        ):
            break
        seen.add(id(owner))
        thing = owner
    return mask_text(text) or _UNKNOWN


def _owner(thing: object, seen: set[int]) -> tuple[object | None, str]:
    """Return an object's holder and the name it uses; a frame only if nothing else holds it."""
    frame = arguments = None
    for referrer in gc.get_referrers(thing):
        if id(referrer) in seen:
            continue
        if isinstance(referrer, FrameType):
            if not referrer.f_code.co_filename.startswith(_HERE):
                frame = referrer
        elif isinstance(referrer, dict):
            key = _key(referrer.items(), thing)
            # A dictionary of attributes, or of a module's globals, stands for its owner.
            for owner in gc.get_referrers(referrer):
                if id(owner) not in seen and getattr(owner, "__dict__", None) is referrer:
                    name = owner.__name__ if isinstance(owner, ModuleType) else type(owner).__name__
                    return owner, f"{name}.{key}"
            if key is not None:
                return referrer, f"[{key!r}]"
        elif isinstance(referrer, CellType):
            for function in gc.get_referrers(*gc.get_referrers(referrer)):
                if not isinstance(function, FunctionType) or id(function) in seen:
                    continue
                cells = function.__closure__ or ()
                if any(each is referrer for each in cells):
                    names = dict(zip(map(id, cells), function.__code__.co_freevars, strict=True))
                    return (
                        function,
                        f"{names[id(referrer)]}, a variable around {function.__name__}()",
                    )
        elif isinstance(referrer, list | tuple | deque):
            index = _key(enumerate(referrer), thing)
            if index is not None and isinstance(thing, nn.Module) and isinstance(referrer, tuple):
                arguments = (referrer, f"[{index}]")  # perhaps those of its running forward
            elif index is not None:
                return referrer, f"[{index}]"
        elif (key := _key(getattr(referrer, "__dict__", {}).items(), thing)) is not None:
            return referrer, f"{type(referrer).__name__}.{key}"
    if arguments is not None:
        return arguments
    return (frame, f"a local of {frame.f_code.co_name}()") if frame is not None else (None, "")


def _error_through(frame: FrameType) -> BaseException | None:
    errors = list_tracked(BaseException)
    return next((e for e in errors if any(f is frame for f, _ in walk_tb(e.__traceback__))), None)


def _key(items: Iterable[tuple[object, Any]], thing: object) -> object:
    return next((key for key, value in items if value is thing), None)


def count_alive(reading: MemoryReading) -> Alive:
    """Count every object that Python tracks, including an earlier run's; takes 0.1 to 1 s."""
    device_type = reading.device.split(":")[0]
    ledger, models = _count_owned(device_type)
    others = ledger.others()
    hidden_bytes = reading.allocated_bytes - sum(ledger.category_bytes.values())
    largest = tuple(name_holders(others))
    graphs = graphs_held(device_type, oldest=True)
    return Alive(
        category_bytes=dict(ledger.category_bytes),
        # A process has far more than tensors in main memory.
        hidden_bytes=0 if device_type == "cpu" else max(0, hidden_bytes),
        module_bytes=dict(ledger.module_bytes.most_common(_MOST_MODULES)),
        models=models,
        largest=largest,
        graphs=tuple(each for each in graphs if not each.holder.startswith("a local of")),
    )


def _count_owned(device_type: str) -> tuple["_Ledger", tuple[LiveModel, ...]]:
    """Count all models and optimizers, and return the largest models."""
    ledger, roots = _Ledger(device_type), root_modules()
    sizes = {id(model): ledger.add_model(model) for model in roots}
    roots.sort(key=lambda model: -sizes[id(model)])
    del roots[_MOST_MODELS:]  # a slice of it would count as a holder
    models = tuple(
        LiveModel(
            name=type(model).__name__, num_bytes=sizes[id(model)], holder=_holder(model, roots)
        )
        for model in roots
        if sizes[id(model)]
    )
    for optimizer in list_tracked(torch.optim.Optimizer):
        ledger.add_optimizer(optimizer.state)
    return ledger, models


class _Ledger:
    """Counts each storage once, for the first category that claims it."""

    def __init__(self, device_type: str) -> None:
        self.category_bytes: Counter[str] = Counter()
        self.module_bytes: Counter[str] = Counter()
        self._device_type = device_type
        self.counted: set[int] = set()
        self._module_of: dict[int, str] = {}

    def add_model(self, model: nn.Module) -> int:
        """Count a model, and return the bytes of its parameters."""
        own_bytes = 0
        for name, parameter in model.named_parameters():
            module = f"{type(model).__name__}: {_module(name)}"
            self._module_of[id(parameter)] = module
            own_bytes += self._add("parameter", parameter, module)
            if parameter.grad is not None:
                self._add("gradient", parameter.grad, module)
        for buffer in model.buffers():
            self._add("buffer", buffer)
        return own_bytes

    def add_optimizer(self, states: Mapping[Any, Any]) -> None:
        for parameter, state in states.items():
            for value in state.values() if isinstance(state, dict) else ():
                if isinstance(value, torch.Tensor):
                    self._add("optimizer", value, self._module_of.get(id(parameter)))

    def others(self, with_graphs: bool = False) -> list[torch.Tensor]:
        """Count all other tensors, and return the largest, of graphs only if asked."""
        found = []
        for tensor in list_tracked(torch.Tensor):
            if issubclass(type(tensor), nn.Parameter):
                self._add("parameter", tensor)
                continue
            category = "other" if tensor.grad_fn is None else "activation"
            num_bytes = self._add(category, tensor)
            if num_bytes and (with_graphs or category == "other"):
                found.append((num_bytes, tensor))
        found.sort(key=lambda pair: -pair[0])
        return [tensor for _, tensor in found[:_MOST_HELD]]

    def _add(self, category: str, tensor: torch.Tensor, module: str | None = None) -> int:
        place = storage_of(tensor, self._device_type)
        if place is None or place[0] in self.counted:
            return 0
        address, num_bytes = place
        self.counted.add(address)
        self.category_bytes[category] += num_bytes
        if module is not None:
            self.module_bytes[module] += num_bytes
        return num_bytes


def _module(name: str) -> str:
    """Name the module of a parameter, the same for all layers.

    >>> _module("model.layers.17.mlp.up_proj.weight"), _module("lm_head.weight")
    ('model.layers.*.mlp', 'lm_head')
    """
    parts = ["*" if part.isdigit() else part for part in name.split(".")[:-1]]
    short = parts[: parts.index("*") + 2] if "*" in parts else parts[:3]
    return ".".join(short) or name
