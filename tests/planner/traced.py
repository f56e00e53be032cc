"""The subprocess of a prediction, which also writes down what ranks were seen to make: `traced.py REQUESTS RESULTS`."""

import json
import os
import sys
import warnings
from pathlib import Path

from trainer_plugins.planner import worker
from trainer_plugins.planner.ddp import Ddp
from trainer_plugins.planner.fsdp2 import Fsdp2
from trainer_plugins.planner.trace import ALLOC, Trace

SEEN: list[list[tuple[str, int, int]]] = []


def noted(_: object, trace: Trace) -> Trace:
    made = [trace.storages[event.number] for event in trace.events if event.kind == ALLOC]
    kept = ("sharding buffers", "gradients")
    SEEN.append([(s.category, s.stream, s.num_bytes) for s in made if s.category in kept])
    return trace


if __name__ == "__main__":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    warnings.filterwarnings("ignore")
    for strategy in (Ddp, Fsdp2):
        strategy.on_one_rank = noted  # type: ignore[method-assign,assignment]
    worker.main(*sys.argv[1:])
    Path(f"{sys.argv[2]}.seen").write_text(json.dumps(SEEN))
    os._exit(0)  # as the worker does
