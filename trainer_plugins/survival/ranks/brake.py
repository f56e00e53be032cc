"""Brake: one rank says why it cannot go on, and all of them end within seconds, with that reason, none of them hanging.

Its peers wait inside a collective that no exception reaches, for as long as `ddp_timeout`, half an hour by default. So
each rank has a thread that looks once a second, in the store by which the ranks found each other, whether one of them
has pulled the brake.
"""

import os
import sys
import threading
import time
from typing import Any
from weakref import ref

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

_KEY = "trainer_plugins/stopped"
GRACE_SECONDS = 5.0
"""For a rank to end by itself, by an exception, once it is known that one has to."""


class Brake:
    """Of one run on several ranks. It is watched for as long as this object lives."""

    def __init__(self) -> None:
        self._store = _get_default_store()
        threading.Thread(target=_watch, args=(ref(self), self._store), daemon=True, name="survival-brake").start()

    def pull(self, why: str) -> None:
        """This rank cannot go on: let every other one know, and end this process too, should nothing else do it."""
        self._store.set(_KEY, f"{dist.get_rank()}\n{why}")


def _watch(brake: "ref[Brake]", store: Any) -> None:
    rank = dist.get_rank()
    while brake() is not None:
        time.sleep(1.0)
        try:
            if not store.check([_KEY]):
                continue
            who, _, why = store.get(_KEY).decode().partition("\n")
        except RuntimeError:  # it went with the rank that kept it: there is nobody left to hear of
            return
        if int(who) != rank:
            sys.stderr.write(f"rank {rank} stops, because rank {who} cannot go on: {why}\n")
        threading.main_thread().join(GRACE_SECONDS)
        if threading.main_thread().is_alive():
            sys.stderr.write(f"rank {rank} ends now: it waits for what rank {who} will not do\n")
            sys.stderr.flush()
            os._exit(1)
        return
