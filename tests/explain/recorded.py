"""A card that writes snapshots as torch does, of what the allocator's model itself does."""

import pickle
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from trainer_plugins.allocator.blocks import Pool
from trainer_plugins.allocator.model import (
    UNLIMITED,
    AllocatorFull,
    AllocatorModel,
    AllocatorRules,
    Block,
)
from trainer_plugins.snapshot.replay import replay
from trainer_plugins.snapshot.trace import Trace
from trainer_plugins.units import MIB

Frames = Sequence[tuple[str, int, str]]

SITE = "/venv/lib/python3.11/site-packages"
MODULE = (f"{SITE}/torch/nn/modules/module.py", 1784, "_call_impl")
MAIN = ("/home/me/project/train.py", 40, "main")
MADE: Frames = (("/home/me/project/model.py", 9, "__init__"), MAIN)
FORWARD: Frames = (("/home/me/project/model.py", 20, "forward"), MODULE, MAIN)
HEAD: Frames = (("/home/me/project/model.py", 30, "forward"), MODULE, MAIN)
LOSS: Frames = ((f"{SITE}/torch/nn/functional.py", 3462, "cross_entropy"), MAIN)
BACKWARD: Frames = (
    ("", 0, "torch::autograd::generated::MmBackward0::apply(std::vector<at::Tensor>&&)"),
    ("??", 0, "torch::autograd::Engine::evaluate_function(std::shared_ptr<GraphTask>&)"),
)
STEP: Frames = ((f"{SITE}/torch/optim/adamw.py", 200, "step"), MAIN)


class RecordedCard(AllocatorModel):
    """Notes events with frames, and writes them down with its segments."""

    def __init__(self, capacity_bytes: int | None = None, **rules: Any) -> None:
        super().__init__(capacity_bytes, AllocatorRules(**rules))
        self.events: list[dict[str, Any]] = []
        self.live: dict[int, tuple[Block, int, list[dict[str, Any]]]] = {}
        self._frames: list[dict[str, Any]] = []

    def note(self, action: str, address: int, size: int, **more: object) -> None:
        event = {"action": action, "addr": address, "size": size, "stream": 0, **more}
        self.events.append({**event, "frames": self._frames})

    def _grow(self, pool: Pool, size: int) -> Block | None:
        block = super()._grow(pool, size)
        if block is not None and block.segment_start is None:
            self.note("segment_alloc", block.address, block.size_bytes)
        return block

    def _release(self, block: Block) -> None:
        self.note("segment_free", block.address, block.size_bytes)
        super()._release(block)

    def _map(self, block: Block, num_bytes: int) -> bool:
        before, address = self.reserved_bytes, block.address
        mapped = super()._map(block, num_bytes)
        if mapped:
            self.note("segment_map", address, self.reserved_bytes - before)
        return mapped

    def _unmap(self, block: Block) -> None:
        base, start, reserved = block.segment_start or 0, block.address, self.reserved_bytes
        page = self._page_bytes(block.pool)
        super()._unmap(block)
        if self.reserved_bytes < reserved:
            first = base - (base - start) // page * page
            self.note("segment_unmap", first, reserved - self.reserved_bytes)

    def alloc(self, size: int, frames: Frames = ()) -> int:
        """Allocate, and return the address."""
        self._frames = [
            {"filename": file, "line": line, "name": name} for file, line, name in frames
        ]
        try:
            block = self.malloc(size)
        except AllocatorFull:
            left = self.capacity_bytes - self.reserved_bytes
            self.note("oom", 0, size, device_free=left)
            raise
        self.note("alloc", block.address, size)
        self.live[block.address] = (block, size, self._frames)
        return block.address

    def release(self, *addresses: int) -> None:
        for address in addresses:
            block, size, _ = self.live.pop(address)
            self.note("free_requested", address, size)
            self.note("free_completed", address, size)
            self.free(block)

    def snapshot(self, last: int | None = None) -> dict[str, Any]:
        """Return what torch would write, with only the last events."""
        segments: list[dict[str, Any]] = []
        for (stream, is_small), pool in self._pools.items():
            found = [block for block, *_ in self.live.values() if block.pool is pool]
            for block in sorted([*found, *pool.free_blocks()], key=lambda block: block.address):
                if not segments or not _continues(segments[-1], block):
                    segments.append(_segment(block, stream, is_small))
                _, requested, frames = self.live.get(block.address, (block, 0, []))
                _add(segments[-1], block, requested, frames)
        events = self.events if last is None else self.events[-last:]
        limit = self.rules.max_split_bytes
        settings = {"max_split_size": limit if limit < UNLIMITED else -1}
        traces = [events]
        return {"segments": segments, "device_traces": traces, "allocator_settings": settings}

    def dump(self, path: Path, last: int | None = None) -> Path:
        path.write_bytes(pickle.dumps(self.snapshot(last), protocol=4))
        return path


def _continues(segment: dict[str, Any], block: Block) -> bool:
    is_behind = block.address == segment["address"] + segment["total_size"]
    return is_behind and (block.prev is not None)


def _segment(block: Block, stream: int, is_small: bool) -> dict[str, Any]:
    return {
        "device": 0,
        "address": block.address,
        "total_size": 0,
        "allocated_size": 0,
        "stream": stream,
        "segment_type": "small" if is_small else "large",
        "segment_pool_id": (0, 0),
        "is_expandable": block.segment_start is not None,
        "blocks": [],
    }


def _add(
    segment: dict[str, Any], block: Block, requested: int, frames: list[dict[str, Any]]
) -> None:
    segment["total_size"] += block.size_bytes
    segment["allocated_size"] += block.size_bytes if block.in_use else 0
    segment["blocks"].append(
        {
            "address": block.address,
            "size": block.size_bytes,
            "requested_size": requested,
            "state": "active_allocated" if block.in_use else "inactive",
            "frames": frames,
        }
    )


def snapshot_of(trace: Trace) -> dict[str, Any]:
    """Write what torch would have written of a reduced trace: its events, and where they led."""
    outcome = replay(trace)
    assert outcome.is_same
    ranges: dict[int, tuple[int, int, str]] = {}
    live = dict(used for start in trace.segments for used in start.used())
    sizes = iter(outcome.block_bytes)
    for start in trace.segments:
        position, kind = start.address, "small" if start.is_small else "large"
        for state, size in start.pieces:
            if state != "unmapped":
                last = max((each for each in ranges if each <= position), default=0)
                if last >= start.address and last + ranges[last][0] == position:
                    ranges[last] = (ranges[last][0] + size, *ranges[last][1:])
                else:
                    ranges[position] = (size, start.stream, kind)
            position += size
    for event in trace.events:
        if event.action == "alloc":
            live[event.address] = next(sizes)
        elif event.action == "free":
            del live[event.address]
        elif event.action == "segment_alloc":
            kind = "small" if event.num_bytes == 2 * MIB else "large"
            ranges[event.address] = (event.num_bytes, event.stream, kind)
        elif event.action == "segment_free":
            del ranges[event.address]
    segments = [
        _bare_segment(address, *about, trace.expandable, live) for address, about in ranges.items()
    ]
    return {"segments": segments, "device_traces": [[], list(_raw(trace))]}


def _bare_segment(
    address: int,
    size: int,
    stream: int,
    kind: str,
    expandable: bool,
    live: dict[int, int],
) -> dict[str, Any]:
    inside = sorted(each for each in live if address <= each < address + size)
    return {
        "device": 1,
        "address": address,
        "total_size": size,
        "allocated_size": sum(live[each] for each in inside),
        "stream": stream,
        "segment_type": kind,
        "is_expandable": expandable,
        "blocks": [
            {"address": each, "size": live[each], "state": "active_allocated"} for each in inside
        ],
    }


def _raw(trace: Trace) -> Iterator[dict[str, Any]]:
    names = {
        "alloc": "alloc",
        "free": "free_completed",
        "segment_alloc": "segment_map" if trace.expandable else "segment_alloc",
        "segment_free": "segment_unmap" if trace.expandable else "segment_free",
    }
    for event in trace.events:
        yield {
            "action": names[event.action],
            "addr": event.address,
            "size": event.num_bytes,
            "stream": event.stream,
        }
