"""Tells `exec` whether a Trainer had callbacks: each process under it leaves a mark."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir

from trainer_plugins.compiled import cache_folder

VARIABLE = "TRAINER_PLUGINS_EXEC"
"""Environment variable with the folder for the marks of one `exec`."""

IMPORTED, TRAINER = "imported", "trainer"  # marks: how far a program got

_LOST = (
    "Either the program builds no Trainer (a custom training loop takes no callbacks), or its"
    f" Python lost PYTHONPATH, TRAINER_PLUGINS_ATTACH or {VARIABLE}: `env -i`, `sbatch"
    " --export=NONE`, a job that sets PYTHONPATH itself, `python -I`, a container or another"
    " machine. Pass them on, or put `python -m trainer_plugins.run` before the script"
)
_NOT_BUILT = (
    "The program imported transformers.Trainer but built none that takes our callbacks: it"
    " may be a custom training loop"
)


def report(mark: str) -> None:
    """Report to the enclosing `exec`, if any, that a program imported, or protects, the Trainer."""
    if folder := os.environ.get(VARIABLE):
        with suppress(OSError):  # the folder is another machine's, or its `exec` is gone
            Path(folder, mark).touch()


@contextmanager
def folder_for_marks() -> Iterator[str]:
    """Create the folder of one `exec` (empty if there is no room), and report to an outer one."""
    report(TRAINER)
    with ExitStack() as stack:
        folder = ""
        # First a place that machines of a cluster share, and that is not cleaned after some days.
        places: tuple[Callable[[], Path], ...] = (
            lambda: cache_folder() / "exec",
            lambda: Path(gettempdir()),
        )
        for place in places:
            with suppress(OSError, RuntimeError):  # the second: this user has no home
                parent = place()
                parent.mkdir(parents=True, exist_ok=True)
                made = TemporaryDirectory(dir=parent, ignore_cleanup_errors=True)
                folder = stack.enter_context(made)
                break
        yield folder


def describe_lack(folder: str) -> str:
    """Report that no Trainer had callbacks, and possible reasons; empty if one had."""
    marks = Path(folder)
    if not folder or (marks / TRAINER).exists():
        return ""
    why = _NOT_BUILT if (marks / IMPORTED).exists() else _LOST
    return f"nothing was protected: no Trainer reported from this command. {why}"
