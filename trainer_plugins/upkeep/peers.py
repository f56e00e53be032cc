"""Records which rank's process ended first: a launcher ends the others, and all fall silent."""

import os
import select
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Thread

import psutil

from trainer_plugins.record.folder import GONE


def watch_peers(folder: Path) -> Callable[[], None]:
    """Create an empty file for each rank of this machine that ends; return a function to stop.

    A thread waits for notifications from the kernel. It sees ranks started by the same launcher.
    """
    peers = _peers() if hasattr(os, "pidfd_open") else {}
    if not peers:
        return lambda: None
    is_over = os.eventfd(0)
    Thread(target=_watch, args=(peers, is_over, folder), name="peers", daemon=True).start()
    return partial(os.eventfd_write, is_over, 1)


def _watch(peers: dict[int, int], is_over: int, folder: Path) -> None:
    poll = select.poll()
    for descriptor in (*peers, is_over):
        poll.register(descriptor, select.POLLIN)
    while is_over not in (ready := [descriptor for descriptor, _ in poll.poll()]):
        for descriptor in ready:
            with suppress(OSError):
                (folder / f"rank-{peers[descriptor]}{GONE}").touch()
            poll.unregister(descriptor)
    for descriptor in (*peers, is_over):
        os.close(descriptor)


def _peers() -> dict[int, int]:
    """Return the rank of each other process of this launch, by process descriptor."""
    found = {}
    launcher = psutil.Process().parent() if "LOCAL_RANK" in os.environ else None
    for each in launcher.children() if launcher is not None else ():
        with suppress(psutil.Error, OSError):  # it has ended already
            rank = each.environ().get("RANK", "") if each.pid != os.getpid() else ""
            if rank.isdecimal():
                found[os.pidfd_open(each.pid)] = int(rank)
    return found
