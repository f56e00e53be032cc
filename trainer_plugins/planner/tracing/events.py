"""Define what a recorded run consists of: storages, and the events of its cards in order."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from trainer_plugins.planner.plan import Category, Moment

ALLOC, FREE, EMPTY_CACHE, BEGIN, LEFT = 1, -1, 0, 2, -2


@dataclass(slots=True)
class Storage:
    """Describes one allocation. Its category may change: gradients are known after the backward."""

    num_bytes: int
    stream: int
    moment: Moment
    operation: str
    module: str
    category: Category
    shape: tuple[int, ...]
    dtype: str
    card: int = 0


class Event(NamedTuple):
    """Describes an `ALLOC` or `FREE` of a storage, an `EMPTY_CACHE`, or the `BEGIN` of a moment.

    A storage that another stream may still read is `LEFT` first, and `FREE` once it was read.
    """

    kind: int
    number: int  # the index in `Trace.storages`, -1 for `EMPTY_CACHE` and `BEGIN`
    moment: Moment


@dataclass(frozen=True, slots=True)
class Trace:
    """Holds the events of the cards of one process, in order."""

    storages: tuple[Storage, ...]
    events: tuple[Event, ...]
    host_peaks: Mapping[Moment, int] = field(default_factory=dict)  # bytes of a node
