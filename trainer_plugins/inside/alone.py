"""Rank 0 of several runs alone; missing ranks are assumed to answer as it would.

A launcher starts all its processes, and those of other ranks end as soon as Python runs
(_site/sitecustomize.py). On the card its NCCL answers for them (card/nccl.cpp), on the CPU a
backend that torch has for its tests. This file patches everything that would wait for them.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from trainer_plugins.patched import Patches


def is_alone() -> bool:
    """Return whether this is the only running process of its program."""
    return "TRAINER_PLUGINS_DRYCUDA_ALONE" in os.environ


@contextmanager
def forgive_others(what: str, notes: list[str]) -> Iterator[None]:
    """If this rank is alone, record an error as a note instead of raising it.

    FSDP 1 looks in its optimizer's state for parameters that only another rank has.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        if not is_alone():
            raise
        notes.append(f"{what} ended early, since only rank 0 runs: {' '.join(str(error).split())}")


def be_all_ranks() -> None:
    """Let this process connect to ranks that do not exist, if it is to run alone."""
    if not is_alone():
        return
    # `import torch.distributed.rendezvous` would return the function of that name.
    rendezvous: Any = sys.modules["torch.distributed.rendezvous"]
    rendezvous._create_c10d_store = lambda *_, **__: dist.HashStore()  # type: ignore[attr-defined]
    fake: Any = torch._C._distributed_c10d.FakeProcessGroup
    make_fake = getattr(fake, "_create_internal", fake)  # torch 2.9 has a public constructor
    dist.Backend.register_backend(
        "alone", lambda _, rank, size, __: make_fake(rank, size), devices=["cpu"]
    )
    c10d: Any = sys.modules["torch.distributed.distributed_c10d"]

    # With a device, torch splits the communicator of all ranks, and NCCL asks the others for the
    # size of each part. Without one, each group has its own size.
    def make_group(
        make: Any, size: int, rank: int, ranks: Any, name: str, *args: Any, **kwargs: Any
    ) -> Any:
        wanted = name if name != "undefined" else "cpu:gloo,cuda:nccl"
        ours = dist.Backend(wanted.replace("gloo", "alone"))
        return make(size, rank, ranks, ours, *args, **{**kwargs, "device_id": None})

    Patches().wrap(c10d, "_new_process_group_helper", make_group)
