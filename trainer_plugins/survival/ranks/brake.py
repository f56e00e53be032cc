"""The brake: one rank says why it cannot go on, and all of them end within seconds, with that reason, none hanging.

Its peers wait inside a collective that no exception reaches, for as long as `ddp_timeout`, half an
hour by default. So each rank has a thread that looks once a second, in the store by which the ranks
found each other, whether one of them has pulled the brake.
"""

import os
import sys
import threading
import time

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

_KEY = "trainer_plugins/brake"
_NAME = "trainer_plugins-brake"
GRACE_SECONDS = 5.0
"""For a rank to end by itself, by an exception, once one of them cannot go on."""


def watch_brake() -> None:
    """Let this process hear of the brake, for as long as its process group lives.

    Again it does nothing.
    """
    if not any(thread.name == _NAME for thread in threading.enumerate()):
        threading.Thread(target=_watch, daemon=True, name=_NAME).start()


def pull_brake(why: str) -> None:
    """This rank cannot go on: let every other one know, and end this process too, should nothing else do it."""
    _get_default_store().set(_KEY, f"{dist.get_rank()}\n{why}")


def _watch() -> None:
    world, store, rank = dist.group.WORLD, _get_default_store(), dist.get_rank()
    while dist.is_initialized() and dist.group.WORLD is world:
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
            sys.stderr.write(
                f"rank {rank} ends now: {GRACE_SECONDS:.0f} s later it still had not by itself\n"
            )
            sys.stderr.flush()
            os._exit(1)
        return
