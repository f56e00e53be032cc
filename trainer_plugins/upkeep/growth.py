"""Names the objects of an established leak and their holder, or the inputs that cause it."""

import gc
import re
import sys
import weakref
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import NamedTuple

import torch
from torch import nn
from transformers import Trainer

from trainer_plugins.finding import Finding
from trainer_plugins.launch.gather_run_facts import try_read
from trainer_plugins.upkeep.frames import batch_of, drop_variables
from trainer_plugins.upkeep.holders import find_unowned, list_tracked, users_holder
from trainer_plugins.upkeep.stack import frames_above
from trainer_plugins.watch.leak import LOOKS_TO_NAME

_MOST_TRIED = 6  # most objects whose holders to find: each link of a chain walks over all objects
_LEAST_FRACTION = 0.1  # fraction of the growth that a container must explain
_NUM_SAMPLED, _NUM_INNER = 4, 100
_CONTAINERS = (list, dict, set, deque)
_WRAPPERS = ("torch.utils.data.", "accelerate.")
_MANY = 10_000  # Python objects of which workers' copies become large
_Container = list[object] | deque[object] | dict[object, object]


class _Named(NamedTuple):
    """The leaking objects, the cure, and the size of their holder."""

    grew: str = ""
    cure: str = ""
    a_time: float = 0.0  # how many more with each step, save or evaluation; 0 if unknown
    num_times: float = 0.0  # how often it grew; 0 if unknown
    holder: str = ""
    held_bytes: int = 0  # 0: graphs hold it, which no tensor shows


class _Kind(NamedTuple):
    name: str
    dtype: torch.dtype
    num_dimensions: int  # the shapes of a kind may differ: batches have different lengths
    has_graph: bool


class GrowthTeller:
    """Compares live objects at two looks, and follows new ones to a name in the user's code."""

    def __init__(
        self, device_type: str, model: nn.Module, optimizer: object | None, dataset: object = None
    ) -> None:
        self._device_type = device_type
        # A watch may outlive a run that died.
        self._model = weakref.ref(model)
        self._optimizer = weakref.ref(optimizer) if optimizer is not None else lambda: None
        self._dataset_words = try_read(partial(_words_of_dataset, dataset), ("", ""))
        self._batches: list[tuple[str, tuple[int, ...]]] = []
        self._before: dict[str, Counter[_Kind]] = {}
        self._old: dict[int, weakref.ref[torch.Tensor]] = {}
        self._lengths: dict[int, int] = {}
        self._named: dict[str, _Named] = {}

    def begin(self) -> None:
        """Remember the live objects."""
        try_read(self._begin, None)

    def look(self) -> None:
        """Record the largest tensor of this step's batch."""
        if (seen := try_read(_largest_of_batch, None)) is not None:
            self._batches.append(seen)

    def tell(self, finding: Finding, step: int, unit: str = "step") -> Finding:
        """Add to a leak the objects grown since `begin`, their holder and the cure; never raise."""
        named = try_read(partial(self._name, finding), _Named())
        if named.a_time:
            when = f" with each {unit}"
            if unit == "step":
                when = f" per step since about step {max(0, round(step - named.num_times))}"
            named = named._replace(grew=f"{named.grew}, {named.a_time:g} more{when}")
        if named.grew:
            self._named[finding.code] = named._replace(grew=f"at step {step} {named.grew}")
        else:  # none of its objects appeared in these two looks
            named = self._named.get(finding.code, named)
        if not named.grew:
            return finding
        held: dict[str, int | str] = {}
        if named.holder:
            held["holder"] = named.holder
            risen_bytes = float(finding.data[f"bytes_a_{unit}"]) * (named.num_times or step)
            held["held_bytes"] = named.held_bytes or int(risen_bytes)
        return replace(
            finding,
            evidence=f"{finding.evidence}; {named.grew}",
            remedy=named.cure or finding.remedy,
            data={**finding.data, **held},
        )

    def _begin(self) -> None:
        gc.collect()
        tensors = list_tracked(torch.Tensor)
        for device_type in {self._device_type, "cpu"}:
            found = find_unowned(tensors, device_type, self._model(), self._optimizer())
            self._before[device_type] = Counter(map(_kind, found))
        self._old = {id(each): weakref.ref(each) for each in tensors}
        self._lengths = {id(each): len(each) for each in _containers()}
        self._batches.clear()

    def _name(self, finding: Finding) -> _Named:
        if finding.code == "leak-tensors":
            return self._tensors(self._device_type)
        if finding.code == "leak-workers":
            return _Named(*self._dataset_words)
        if finding.code == "leak-cache":
            return _Named(_words_of_batches(self._batches))
        if finding.code != "leak-host":
            return _Named()
        if (named := self._tensors("cpu")).grew:
            return named
        return self._container(float(finding.data["bytes_a_step"]) * LOOKS_TO_NAME)

    def _tensors(self, device_type: str) -> _Named:
        gc.collect()
        tensors = list_tracked(torch.Tensor)
        found = find_unowned(tensors, device_type, self._model(), self._optimizer())
        del tensors  # or it would count as a holder
        alive = Counter(map(_kind, found))
        kind_bytes = Counter[_Kind]()
        for each in found:
            kind_bytes[_kind(each)] += each.nbytes
        grown = alive - self._before[device_type]
        # A graph that grows ends in one tensor. One more of a kind comes and goes with each step.
        new = [
            each
            for each in found
            if not self._is_old(each) and (_has_graph(each) or grown[_kind(each)] >= LOOKS_TO_NAME)
        ]
        found.clear()  # so would this
        new = _select_held_in_python(new)
        new.sort(key=lambda each: (grown[_kind(each)] < LOOKS_TO_NAME, -each.nbytes))
        tried_kinds: Counter[_Kind] = Counter()
        for tensor in new:
            kind = _kind(tensor)
            tried_kinds[kind] += 1
            if tried_kinds[kind] > 2 or len(tried_kinds) > _MOST_TRIED:
                continue
            if holder := users_holder(tensor, new):
                named = _describe(tensor, alive[kind], grown[kind] / LOOKS_TO_NAME, holder)
                return named._replace(held_bytes=0 if kind.has_graph else kind_bytes[kind])
        return _Named()

    def _is_old(self, tensor: torch.Tensor) -> bool:
        # A new tensor may have an old one's address.
        old = self._old.get(id(tensor))
        return old is not None and old() is tensor

    def _growth_bytes(self, container: _Container) -> float:
        """Estimate the growth in main memory, from the size of the last few items."""
        last = _items(container)[-_NUM_SAMPLED:]
        item_bytes = sum(map(_deep_bytes, last)) / max(1, len(last))
        return (len(container) - self._lengths[id(container)]) * item_bytes

    def _container(self, least_bytes: float) -> _Named:
        """Find the list, deque or dictionary that grew by the most bytes."""
        longer = [
            each
            for each in _containers()
            if len(each) - self._lengths.get(id(each), len(each)) >= LOOKS_TO_NAME
        ]
        longer.sort(key=lambda each: -self._growth_bytes(each))
        del longer[_MOST_TRIED:]  # a slice would be another holder
        for grown in longer:
            if self._growth_bytes(grown) < _LEAST_FRACTION * least_bytes:
                break
            if holder := users_holder(grown, longer):
                a_step = (len(grown) - self._lengths[id(grown)]) / LOOKS_TO_NAME
                place = _place(holder)
                what = f"{len(grown)} x {type(_items(grown)[-1]).__name__} in {place}"
                cure = f"Limit {place}, or empty it: `{_name(place)}.clear()`."
                return _Named(what, cure, a_step, len(grown) / a_step)
        return _Named()


def _select_held_in_python(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Leave out tensors held only by a graph, or by a frame of this step."""
    running = {id(frame) for frame in frames_above()}
    inside: set[int] = set()
    for referrer in gc.get_referrers(*tensors):
        if referrer is not tensors and id(referrer) not in running:
            inside.update(map(id, gc.get_referents(referrer)))
    return [each for each in tensors if id(each) in inside]


def _containers() -> list[_Container]:
    return [each for each in gc.get_objects() if type(each) in (list, deque, dict)]


def _items(container: _Container | tuple[object, ...]) -> list[object]:
    return list(container.values()) if isinstance(container, dict) else list(container)


def _deep_bytes(value: object, depth: int = 2) -> int:
    if isinstance(value, torch.Tensor):
        return value.nbytes if value.device.type == "cpu" else 0
    own = max(sys.getsizeof(value), int(getattr(value, "nbytes", 0)))
    if depth and isinstance(value, (list, tuple, dict, deque)):
        inner = _items(value)
        sample = inner[:_NUM_INNER]
        of_sample = sum(_deep_bytes(each, depth - 1) for each in sample)
        own += of_sample * len(inner) // max(1, len(sample))
    return own


def _kind(tensor: torch.Tensor) -> _Kind:
    name = type(tensor).__name__
    return _Kind(name, tensor.dtype, tensor.dim(), _has_graph(tensor))


def _has_graph(tensor: torch.Tensor) -> bool:
    try:
        return tensor.grad_fn is not None
    except RuntimeError:  # a view whose base was written to
        return False


def _describe(tensor: torch.Tensor, alive: int, a_time: float, holder: str) -> _Named:
    kind, place = _kind(tensor), _place(holder)
    what = f"{kind.name} {list(tensor.shape)} {str(kind.dtype).partition('.')[2]}"
    name = _name(place)
    if a_time < 1:
        grew = f"{what} held by {place} keeps the graphs of all steps"
        cure = f"Add a number: `{name} += loss.item()`, or `loss.detach()`."
        return _Named(grew, cure, holder=place)
    graph = ", each with its graph," if kind.has_graph else ""
    grew = f"{alive} x {what}{graph} held by {place}"
    if "a local of" in place:
        cure = f"Keep an error's text, for its frames hold tensors: `{name}` of `str(error)`."
    elif kind.has_graph:
        kept = "tensor.detach().cpu()" if kind.num_dimensions else "loss.item()"
        cure = f"Keep it without its graph: `{name}.append({kept})`."
    else:
        cure = f"Keep it off the card: `tensor.detach().cpu()`; or empty it: `{name}.clear()`."
    return _Named(grew, cure, a_time, alive / a_time, place)


def _place(holder: str) -> str:
    """Remove positions in lists, which differ from tensor to tensor."""
    return re.sub(r"(?:\[\d+\])+", "[...]", holder).removesuffix("[...]")


def _name(place: str) -> str:
    return re.split(r" -> |,|\[", place)[0]


def _largest_of_batch() -> tuple[str, tuple[int, ...]] | None:
    frames = [*frames_above()][::-1]  # outermost first
    batch = batch_of(frames, Trainer)
    drop_variables(frames)
    if not batch:
        return None
    name = max(batch, key=lambda each: prod(batch[each].shape))
    return name, batch[name].shape


def _words_of_batches(seen: Sequence[tuple[str, tuple[int, ...]]]) -> str:
    """Describe how many shapes the batches of these steps had; empty if all had the same."""
    shapes = sorted({shape for _, shape in seen}, key=prod)
    if len(shapes) < 2:
        return ""
    first, last = list(shapes[0]), list(shapes[-1])
    return f"{len(shapes)} shapes of {seen[-1][0]} in {len(seen)} steps, {first} to {last}"


def _words_of_dataset(dataset: object) -> tuple[str, str]:
    """Name the containers of a dataset, which every worker has, and the cure; empty if none."""
    while type(dataset).__module__.startswith(_WRAPPERS) and hasattr(dataset, "dataset"):
        dataset = dataset.dataset
    kind = type(dataset).__name__
    values = {f"{kind}.{name}": value for name, value in getattr(dataset, "__dict__", {}).items()}
    if isinstance(dataset, list):
        values = {"train_dataset, a list,": dataset}
    kept = {name: len(value) for name, value in values.items() if type(value) in _CONTAINERS}
    if type(dataset).__module__.startswith("datasets.") or not kept:
        return "", ""
    place = max(kept, key=kept.__getitem__)
    if kept[place] >= _MANY:
        return (
            f"{place} has {kept[place]:,} Python objects: each read writes a count beside one, and"
            " the worker gets a copy of that page (pytorch#13246)",
            "Keep the rows in one array or an Arrow table: `numpy.array(rows)`,"
            " `datasets.Dataset.from_list(rows)`.",
        )
    cure = f"self.{place.rpartition('.')[2]}.clear()"
    return (
        f"each worker has its own {', '.join(kept)}",
        f"Bound what `{kind}.__getitem__` keeps, or empty it: `{cure}`.",
    )
