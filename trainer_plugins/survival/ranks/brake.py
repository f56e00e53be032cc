"""The brake: one rank says why it cannot go on, and all of them end within seconds.

Its peers wait inside a collective that no exception reaches, for as long as `ddp_timeout`, half an
hour by default. So each rank has a thread that looks once a second whether one of them has pulled
the brake. It looks in the store by which the ranks found each other.
"""

import os
import sys
import threading
import time

import torch.distributed as dist

_KEY = "trainer_plugins/brake"
_NAME = "trainer_plugins-brake"
GRACE_SECONDS = 5.0
"""Time that a rank has to end by itself, by an exception, after one of them cannot go on."""


def watch_brake() -> None:
    """Let this process hear of the brake, for as long as its process group lives.

    A second call does nothing.
    """
    if not any(thread.name == _NAME for thread in threading.enumerate()):
        threading.Thread(target=_watch, daemon=True, name=_NAME).start()


def pull_brake(why: str) -> None:
    """Tell every other rank why this one cannot go on, and end this process if nothing else does.

    Args:
        why: the reason, which every rank writes to stderr.
    """
    from torch.distributed.distributed_c10d import _get_default_store

    _get_default_store().set(_KEY, f"{dist.get_rank()}\n{why}")


def _watch() -> None:
    from torch.distributed.distributed_c10d import _get_default_store

    world, store, rank = dist.group.WORLD, _get_default_store(), dist.get_rank()
    while dist.is_initialized() and dist.group.WORLD is world:
        time.sleep(1.0)
        try:
            if not store.check([_KEY]):
                continue
            who, _, why = store.get(_KEY).decode().partition("\n")
        except RuntimeError:  # the store went with the rank that kept it
            return
        if int(who) != rank:
            sys.stderr.write(f"rank {rank} stops, because rank {who} cannot go on: {why}\n")
        threading.main_thread().join(GRACE_SECONDS)
        if threading.main_thread().is_alive():
            sys.stderr.write(
                f"rank {rank} ends now: {GRACE_SECONDS:.0f} s later it had not ended by itself\n"
            )
            sys.stderr.flush()
            os._exit(1)
        return
