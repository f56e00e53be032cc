"""Run a command on dry cards, and end it with every process it started."""

import contextlib
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from trainer_plugins import forks
from trainer_plugins.drycuda.dry_cuda import DryCuda
from trainer_plugins.planner.plan import PlanError
from trainer_plugins.units import GIB, size

_LOOKS_SECONDS = 0.5
_MOST_BYTES = 16 * GIB
"""The limit of a prediction's memory, or half of the machine if that is less: it is stopped before
the kernel kills another program.
"""

_FORKED = "trainer_plugins.inside.of_request"
_IMPORTS = (
    "transformers.trainer",
    _FORKED,
    "trainer_plugins.inside.batches",  # also watches trainings
)


def run_to_end(
    command: Sequence[str],
    environment: Mapping[str, str],
    log: Path,
    timeout_seconds: float,
    most_bytes: float = math.inf,
) -> int:
    """Run a command to its end, with its output in a file; return its exit code.

    It may take `most_bytes` of main memory for itself.

    Raises:
        PlanError: it cannot be run, it took too long or too much, or it left the dry card.
    """
    with log.open("w") as output:
        try:
            process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # without a terminal to ask
            )
        except OSError as error:
            raise PlanError(f"the command cannot be run: {error}") from error
    return _wait(process, timeout_seconds, most_bytes)


def run_fork_to_end(
    request: Path,
    imports: Sequence[str],
    dry: DryCuda,
    environment: Mapping[str, str],
    log: Path,
    timeout_seconds: float,
) -> int:
    """Train a pickled request in a fork of a Python process that has already done its imports.

    The first call imports them, over the dry libraries; later calls save that time. If a fork is
    not safe, as after an import that starts a thread, each call starts a new Python. `imports` are
    added to transformers; they too may take `timeout_seconds`.

    Raises:
        PlanError: it took too long or too much.
    """
    home = str(Path(__file__).parent.parent.parent)
    path = os.pathsep.join([environment["PYTHONPATH"], home])
    major, minor = dry.kind.capability
    of_server = {
        **environment,
        "PYTHONPATH": path,
        "TRAINER_PLUGINS_DRYCUDA": "",  # it takes no memory on the cards
        # Not a TRAINER_PLUGINS_* variable, in which a server and its forks may differ: imported
        # modules query the card.
        "DRYCUDA_SERVES": f"{major} {minor}",
        "DS_ACCELERATOR": "cuda",  # otherwise DeepSpeed would ask CUDA
    }
    server = forks.server_for((*_IMPORTS, *imports), of_server)
    if not server.is_ready(timeout_seconds):
        raise _late(timeout_seconds)
    wall = json.dumps(dry.wall.asked if dry.wall else {})
    call = forks.Call(
        words=(_FORKED, wall, str(request)),
        folder=os.getcwd(),
        environ={**environment, "PYTHONPATH": path},
        scratch=str(dry.folder),  # if this process is killed
    )
    most_bytes = min(_MOST_BYTES, psutil.virtual_memory().total // 2)
    process = None
    with contextlib.suppress(OSError):  # the idle server has just ended
        if server.forks:
            with log.open("w") as output, open(os.devnull) as nothing:
                streams = (nothing.fileno(), output.fileno(), output.fileno())
                process = forks.Forked(server, call, streams)
    if process is not None:
        return _wait(process, timeout_seconds, most_bytes)
    python = [sys.executable, "-X", "faulthandler", "-m", *call.words]
    return run_to_end(python, call.environ, log, timeout_seconds, most_bytes)


def _wait(
    process: subprocess.Popen[bytes] | forks.Forked, timeout_seconds: float, most_bytes: float
) -> int:
    end = time.monotonic() + timeout_seconds
    try:
        started = psutil.Process(process.pid)
    except psutil.NoSuchProcess:  # a fork that has already ended
        return process.wait()
    try:
        while (left := end - time.monotonic()) > 0:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(min(left, _LOOKS_SECONDS))
            held = _own_bytes(started)
            if held > most_bytes:
                raise PlanError(
                    f"the dry run took {size(held)} of main memory, and was stopped: most take 1"
                    " to 3 GiB. Does the model have far too many layers?"
                )
            if any(map(_is_without_the_card, _family(started))):
                raise PlanError(
                    "the command starts a Python without our environment (sudo, env -i, ...),"
                    " which would not use the dry card: start it without that"
                )
        raise _late(timeout_seconds)
    finally:
        for each in _family(started):
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        process.wait()


def _own_bytes(process: psutil.Process) -> int:
    """Return the private main memory of a process; 0 if it has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        memory = process.memory_info()
        return int(memory.rss - memory.shared)
    return 0


def _late(timeout_seconds: float) -> PlanError:
    return PlanError(f"the command took more than {timeout_seconds:.0f} s: raise --timeout")


def _family(started: psutil.Process) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return [*started.children(recursive=True), started]
    return []


def _is_without_the_card(each: psutil.Process) -> bool:
    with contextlib.suppress(OSError):
        # Twice: mappings may change while we read them, and lines are then skipped.
        reads = (Path(f"/proc/{each.pid}/maps").read_text() for _ in range(2))
        return all("/libtorch_cpu.so" in maps and "/libdrycuda.so" not in maps for maps in reads)
    return False
