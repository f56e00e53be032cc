"""Runs a command on dry cards, and ends it with all that it has started."""

import contextlib
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from trainer_plugins.planner.plan import PlanError

_LOOKS_SECONDS = 0.5


def ended(
    command: Sequence[str], environment: Mapping[str, str], log: Path, timeout_seconds: float
) -> int:
    """Run a command to its end, its output in a file; return its exit code.

    Raises:
        PlanError: it cannot be run, it took too long, or it has left the dry card.
    """
    with log.open("w") as output:
        try:
            process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # it has no terminal to ask
            )
        except OSError as error:
            raise PlanError(f"the command cannot be run: {error}") from error
        started = psutil.Process(process.pid)
        end = time.monotonic() + timeout_seconds
        try:
            while (code := process.poll()) is None:
                if time.monotonic() > end:
                    raise PlanError(
                        f"the command took more than {timeout_seconds:.0f} s: raise --timeout"
                    )
                if any(map(_is_without_the_card, _family(started))):
                    raise PlanError(
                        "the command starts a Python with torch in an environment of its own (by"
                        " sudo, env -i or the like): it would not be on the dry card there"
                    )
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_LOOKS_SECONDS)
            return code
        finally:
            for each in _family(started):
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()
            process.wait()


def _family(started: psutil.Process) -> list[psutil.Process]:
    """Return what a process has started, and it."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return [*started.children(recursive=True), started]
    return []


def _is_without_the_card(each: psutil.Process) -> bool:
    # Twice: what is mapped may change while it is read, and lines are then passed over.
    return all(_lacks_the_card(Path(f"/proc/{each.pid}/maps")) for _ in range(2))


def _lacks_the_card(path: Path) -> bool:
    with contextlib.suppress(OSError):
        maps = path.read_text()
        return "/libtorch_cpu.so" in maps and "/libdrycuda.so" not in maps
    return False
