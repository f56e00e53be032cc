"""Processes that a test starts end with it: all of them, whatever they started themselves."""

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import psutil

from tests.forked import MARK
from tests.forked.relay import Relay

ENDS_A_HANG = 1800.0
"""Seconds. No measure of speed: on a machine with ten times as much to do as it has cores, launches take minutes."""


@cache
def _relay() -> Relay:
    return Relay()


def forked(call: Sequence[str | Path]) -> list[str | Path]:
    """Return a call that does the same, with a fork in place of a new Python."""
    if str(call[0]) == sys.executable:
        return [_relay().python, *call[1:]]
    if Path(call[0]).parent == Path(sys.executable).parent:
        return [_relay().python, *call]  # a console script
    return [*call]


def forking(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which a shell finds `python`, `accelerate` and so on that are forked."""
    path = [str(_relay().python.parent), str(Path(sys.executable).parent), environ["PATH"]]
    return {**environ, "PATH": os.pathsep.join(path)}


def start(
    call: Sequence[str | Path],
    *,
    environ: Mapping[str, str] | None = None,
    fresh: str = "",
    **options,
) -> subprocess.Popen[bytes]:
    """Begin a command whose processes `end` finds again. Options go to Popen.

    A Python is forked from one that has imported torch and transformers, if `fresh` does not give a
    reason to start a new one.

    They are found by a variable that each hands on to its children. A process group would not do:
    torchrun starts each rank in a session of its own, where it outlives a launcher that is killed.
    """
    mark = uuid.uuid4().hex
    environ = {**(os.environ if environ is None else environ), MARK: mark}
    process = subprocess.Popen(
        call if fresh else forked(call), env=environ, start_new_session=True, **options
    )
    process.mark = mark  # type: ignore[attr-defined]
    return process


def end(*processes: subprocess.Popen[bytes], timeout: float = ENDS_A_HANG) -> list[int]:
    """Wait for commands that `start` began, then kill what they left running.

    Returns their exit codes.

    Raises:
        TimeoutExpired: one did not end; all were killed, with all that they started.
    """
    deadline = time.monotonic() + timeout
    try:
        return [
            process.wait(timeout=max(0.0, deadline - time.monotonic())) for process in processes
        ]
    finally:
        kill(*processes)


def kill(*processes: subprocess.Popen[bytes]) -> None:
    """Kill what still runs of commands that `start` began."""
    while left := [each for process in processes for each in left_of(process)]:
        for each in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        psutil.wait_procs(left, timeout=60)
    for process in processes:
        process.wait()


def left_of(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """Find what runs of a command that `start` began: it, its children, and theirs."""
    left = []
    for each in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            mark = process.mark  # type: ignore[attr-defined]
            is_its = each.name() == mark[:15] or each.environ().get(MARK) == mark
            if is_its and each.status() != psutil.STATUS_ZOMBIE:
                left.append(each)
    return left


def free_port() -> str:
    """Return a port at which nobody listens now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def run(
    call: Sequence[str | Path],
    *,
    check: bool = False,
    timeout: float = ENDS_A_HANG,
    **options,
) -> subprocess.CompletedProcess[str]:
    """Do what `subprocess.run(call, capture_output=True, text=True)` does, and leave no process behind.

    What it prints goes through files: a pipe would stay open as long as anything that was left
    behind.

    Raises:
        AssertionError: it did not end, or with `check` its exit code is not 0.
    """
    with (
        tempfile.TemporaryFile("w+", errors="replace") as out,
        tempfile.TemporaryFile("w+", errors="replace") as err,
    ):
        process = start(call, stdout=out, stderr=err, **options)
        try:
            end(process, timeout=timeout)
        except subprocess.TimeoutExpired as error:
            err.seek(0)
            raise AssertionError(f"{error}\n{err.read()[-5000:]}") from None
        out.seek(0)
        err.seek(0)
        done = subprocess.CompletedProcess(call, process.returncode, out.read(), err.read())
    assert not check or done.returncode == 0, done.stderr[-5000:]
    return done
