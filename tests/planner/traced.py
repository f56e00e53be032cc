"""The subprocess of a prediction, which also writes down what ranks were seen to make: `traced.py REQUESTS RESULTS`.

Into RESULTS.seen what is divided among them, and into RESULTS.sums the bytes of each sum that a
backward made anew.
"""

import json
import os
import sys
import warnings
from pathlib import Path
from unittest.mock import patch

from trainer_plugins.planner import worker
from trainer_plugins.planner.tracing.events import ALLOC, Trace
from trainer_plugins.planner.tracing.trace import Tracker

SEEN: list[list[tuple[str, int, int]]] = []
SUMS: list[list[int]] = []

watched = Tracker.trace


def noted(tracker: Tracker) -> Trace:
    trace = watched(tracker)
    made = [trace.storages[event.number] for event in trace.events if event.kind == ALLOC]
    kept = ("sharding buffers", "gradients")
    SEEN.append([(s.category, s.stream, s.num_bytes) for s in made if s.category in kept])
    SUMS.append([s.num_bytes for s in made if (s.moment, s.operation) == ("backward", "aten::add")])
    return trace


if __name__ == "__main__":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    warnings.filterwarnings("ignore")
    with patch.object(Tracker, "trace", noted):
        worker.main(*sys.argv[1:])
    Path(f"{sys.argv[2]}.seen").write_text(json.dumps(SEEN))
    Path(f"{sys.argv[2]}.sums").write_text(json.dumps(SUMS))
    os._exit(0)  # as the worker does
