"""Makes an answer of what the allocator has recorded: a line of points, the user's stacks."""

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from trainer_plugins.allocator.model import MIN_BLOCK_BYTES
from trainer_plugins.inside.named import numbered

_MOST_POINTS = 400
_OURS = re.compile(r"trainer_plugins/(?:drycuda|inside|plug_in)/|torch/_ops\.py$")
_BACKWARD = {"filename": "/torch/autograd/graph.py", "line": 0, "name": "_engine_run_backward"}

_ALLOCATED = {"alloc": 1, "free_completed": -1}
_RESERVED = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}


def timeline_of(
    events: Sequence[Mapping[str, Any]], began: Iterable[tuple[int, str]]
) -> list[tuple[str, int, int]]:
    """Return moment, allocated and reserved bytes, each the maximum of equally many events.

    Args:
        events: of one card, as `_snapshot` has them in `device_traces`.
        began: when each moment began, in microseconds since 1970, the first one at 0.
    """
    moments = [*began]
    interval = len(events) // _MOST_POINTS + 1
    points: list[tuple[str, int, int]] = []
    allocated = reserved = now = in_point = 0
    for event in events:
        blocks = -(-event["size"] // MIN_BLOCK_BYTES)  # an event has what was asked for
        allocated += _ALLOCATED.get(event["action"], 0) * blocks * MIN_BLOCK_BYTES
        reserved += _RESERVED.get(event["action"], 0) * event["size"]
        while now + 1 < len(moments) and moments[now + 1][0] <= event.get("time_us", 0):
            now += 1
        moment = moments[now][1]
        if points and points[-1][0] == moment and in_point < interval:
            _, high, held = points[-1]
            points[-1] = (moment, max(high, allocated), max(held, reserved))
            in_point += 1
        else:
            points.append((moment, allocated, reserved))
            in_point = 1
    return points


def beginnings_of(
    events: Sequence[Mapping[str, Any]], began: Iterable[tuple[int, str]]
) -> list[tuple[int, str]]:
    """Return the number of the first event of each moment; arguments as of `timeline_of`."""
    waiting, found = [*began], []
    for number, event in numbered(events):
        while waiting and waiting[0][0] <= event.get("time_us", 0):
            found.append((number, waiting.pop(0)[1]))
    return found


def leave_out_the_dry_run(snapshot: dict[str, Any]) -> None:
    """Leave the frames of the dry run itself out of the stacks.

    A stack that had no others is one of autograd's thread, which has no Python below it.
    """
    segments = (block for segment in snapshot["segments"] for block in segment["blocks"])
    left: dict[tuple[int, ...], list[Mapping[str, Any]]] = {}  # by the identities of frames
    for each in (*segments, *(event for card in snapshot["device_traces"] for event in card)):
        if frames := each.get("frames"):
            key = tuple(map(id, frames))
            if key not in left:
                own = [frame for frame in frames if not _is_ours(frame["filename"])]
                left[key] = own or [_BACKWARD]
            each["frames"] = left[key]  # one list, which a pickle holds once


@functools.cache
def _is_ours(filename: str) -> bool:
    return _OURS.search(filename) is not None
