"""Extract the allocator's actions from a memory snapshot of torch; sizes in bytes.

It keeps actions, addresses, sizes and streams: no frame, no name. This keeps a trace, and names its
source:

    python -m benchmarks.snapshots SNAPSHOT OWNER/REPOSITORY@COMMIT:PATH KEPT.json.gz
"""

import gzip
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from trainer_plugins.snapshot import cards
from trainer_plugins.snapshot.cards import Action, Event
from trainer_plugins.snapshot.pickled import NotReadableError
from trainer_plugins.snapshot.trace import StartSegment, Trace, trace_of

_STEP = 512  # each address is a multiple of it

_LETTERS: Mapping[Action, str] = {
    "alloc": "a",
    "free": "f",
    "segment_alloc": "+",
    "segment_free": "-",
    "oom": "o",
}


def read(path: Path) -> list[Trace]:
    """Read a snapshot, or a file that `write` kept: a trace for each card with events.

    Raises:
        NotReadableError: it is not a snapshot, or holds no events.
        NotModelledError: the allocator's model cannot repeat it.
    """
    if path.name.endswith(".json.gz"):
        return [_kept(path)]
    snapshot = cards.read(path)
    found = [trace_of(card, path.name) for card in snapshot.cards if card.events]
    if not found:
        raise NotReadableError("it has no events: recording was not on when it was dumped")
    return found


def write(trace: Trace, path: Path) -> None:
    """Write a trace to a small file."""
    events = trace.events
    kept = {
        "source": trace.source,
        "expandable": trace.expandable,
        "segments": [[*segment[:3], segment.pieces] for segment in trace.segments],
        "actions": "".join(_LETTERS[event.action] for event in events),
        # The difference from the previous event takes fewer digits than an address.
        "addresses": [
            (after.address - before.address) // _STEP for before, after in _pairs(events)
        ],
        "sizes": [event.num_bytes for event in events],
        "streams": [event.stream for event in events] if any(e.stream for e in events) else [],
    }
    text = json.dumps(kept, separators=(",", ":"))
    path.write_bytes(gzip.compress(text.encode(), 9, mtime=0))


def _kept(path: Path) -> Trace:
    kept = json.loads(gzip.decompress(path.read_bytes()))
    actions = {letter: action for action, letter in _LETTERS.items()}
    streams = kept["streams"] or [0] * len(kept["sizes"])
    events, address = [], 0
    for letter, step, size, stream in zip(
        kept["actions"], kept["addresses"], kept["sizes"], streams, strict=True
    ):
        address += step * _STEP
        events.append(Event(actions[letter], address, size, stream))
    segments = [
        StartSegment(address, stream, is_small, tuple((state, size) for state, size in pieces))
        for address, stream, is_small, pieces in kept["segments"]
    ]
    return Trace(kept["source"], kept["expandable"], tuple(segments), tuple(events))


def _pairs(events: Sequence[Event]) -> Iterator[tuple[Event, Event]]:
    return pairwise([Event("alloc", 0, 0, 0), *events])


if __name__ == "__main__":
    SNAPSHOT, SOURCE, KEPT = sys.argv[1:]
    (ONLY,) = read(Path(SNAPSHOT))
    write(ONLY._replace(source=SOURCE), Path(KEPT))
