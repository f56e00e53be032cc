"""Rank 0 of several runs alone: the ranks that are not there answer as it would.

A launcher starts all its processes, and those of other ranks end as soon as Python runs
(_site/sitecustomize.py). On the card its NCCL answers for them (card/nccl.cpp), on the CPU
a backend that torch has for its tests. Here is what would wait for them.
"""

import functools
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist


def is_alone() -> bool:
    """Return whether this is the only process of its program that runs."""
    return "TRAINER_PLUGINS_DRYCUDA_ALONE" in os.environ


@contextmanager
def forgive_others(what: str, notes: list[str]) -> Iterator[None]:
    """Note an error of a rank that is alone, instead of ending by it.

    FSDP 1 looks in its optimizer's state for parameters that only another rank has.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        if not is_alone():
            raise
        notes.append(
            f"{what} ended early, it needs the other ranks: {' '.join(str(error).split())}"
        )


def be_all_ranks() -> None:
    """Let this process meet ranks that are not there, if it is to be alone."""
    if not is_alone():
        return
    # `import torch.distributed.rendezvous` would give the function of that name.
    rendezvous: Any = sys.modules["torch.distributed.rendezvous"]
    rendezvous._create_c10d_store = lambda *_, **__: dist.HashStore()  # type: ignore[attr-defined]
    group: Any = torch._C._distributed_c10d.FakeProcessGroup
    dist.Backend.register_backend(
        "alone", lambda _, rank, size, __: group._create_internal(rank, size), devices=["cpu"]
    )
    c10d: Any = sys.modules["torch.distributed.distributed_c10d"]
    make = c10d._new_process_group_helper

    # With a device torch splits the communicator of all ranks, and NCCL learns from the others how
    # many are in a part. Without, each group says so.
    @functools.wraps(make)
    def make_group(
        size: int,
        rank: int,
        ranks: Any,
        name: str,
        *args: Any,
        device_id: Any = None,
        **kwargs: Any,
    ) -> Any:
        wanted = name if name != "undefined" else "cpu:gloo,cuda:nccl"
        ours = dist.Backend(wanted.replace("gloo", "alone"))
        return make(size, rank, ranks, ours, *args, **kwargs)

    c10d._new_process_group_helper = make_group
