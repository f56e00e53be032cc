"""Two ranks beside a plan of them, and whether this torch can be planned for several GPUs."""

import json
import sys
from pathlib import Path
from typing import Any

import torch

from tests import processes
from tests.distributed.launched import environment, free_port, start

IS_TOO_OLD = torch.__version__.startswith("2.9.")
"""For several GPUs, and for DeepSpeed on one: its collectives take no fake tensors, and a plan or a search says so."""

WHY_NOT = "several GPUs need a newer torch, and the plan says so"


def two_ranks_and_the_planner(script: Path, folder: Path, **environ: str) -> list[Any]:
    """Run `script ranks FOLDER` as two ranks, then `script planner FOLDER`; return what each wrote.

    They write rank-0.json, rank-1.json and planner.json.
    """
    launch = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_port(),
        **environ,
    }
    call: list[str | Path] = [sys.executable, script, "ranks", folder]
    ranks = [
        start(call, folder / f"log-{rank}", RANK=str(rank), LOCAL_RANK=str(rank), **launch)
        for rank in (0, 1)
    ]
    processes.end(*ranks)
    printed = (folder / "log-0" / "printed.txt").read_text()
    assert (folder / "rank-1.json").is_file(), printed[-3000:]
    planner = processes.run([sys.executable, script, "planner", folder], environ=environment())
    assert (folder / "planner.json").is_file(), planner.stderr[-3000:]
    names = ("rank-0", "rank-1", "planner")
    return [json.loads((folder / f"{name}.json").read_text()) for name in names]
