"""Runs modules in processes forked from a server that has already imported their dependencies.

Importing torch and transformers takes four seconds of CPU time; a process forked after the imports
skips that. A server belongs to the process that started it, and ends with it.
"""

import contextlib
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

from trainer_plugins.forks.server import NUMBER, READY, kill_group

logger = logging.getLogger(__name__)

_MAY_DIFFER = re.compile(
    r"TMPDIR|PYTEST_CURRENT_TEST|TORCHINDUCTOR_CACHE_DIR|PYTORCH_NVML_BASED_CUDA_CHECK"
    r"|(LOCAL_|GROUP_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|SIMGPU_CARD|TRAINER_PLUGINS_\w+"
    r"|ACCELERATE_(MIXED_PRECISION|TORCH_DEVICE|USE_CPU)"
)
"""Variables whose value may differ between a forked process and its server.

torch, transformers and their dependencies read some 400 variables during import; any variable not
listed here is assumed to be one of them. The listed ones are read later, when they are used; for
TORCHINDUCTOR_CACHE_DIR and PYTORCH_NVML_BASED_CUDA_CHECK, libraries set their own defaults.
`tests/test_forks.py` checks which variables are read.
"""

_NO_THREADS = {
    "OPENBLAS_NUM_THREADS": "1",  # numpy's BLAS starts its threads on load
    "JE_ARROW_MALLOC_CONF": "background_thread:false",  # as does pyarrow's allocator
}
"""Variables for the server's imports: a process with threads must not fork."""
_SERVE = (
    # a file in the current folder must not shadow the standard library
    "import sys; sys.path[:] = filter(None, sys.path); "
    "from trainer_plugins.forks import server; server.serve()"
)


class Call(NamedTuple):
    """A command to run: `python -m WORDS` in a folder and an environment."""

    words: tuple[str, ...]
    folder: str
    environ: Mapping[str, str]
    scratch: str = ""  # folder to delete if the calling process is killed


Streams: TypeAlias = tuple[int, int, int]
"""File descriptors for the standard input, output and error of the started process."""


class ForkServer:
    """Starts processes that share the same imports.

    The server process ends when the last reference to this object goes.

    Args:
        imports: the modules that the server imports.
        environ: the environment in which it imports them.
    """

    def __init__(self, imports: Sequence[str], environ: Mapping[str, str]) -> None:
        self._needs = _needs(imports, environ)
        self.refusal: str | None = None
        """Why the server does not fork; empty if it does; None while it imports."""
        self._control, theirs = _socketpair()
        command = [sys.executable, "-X", "faulthandler", "-c", _SERVE, str(theirs.fileno())]
        with theirs:
            self._process = subprocess.Popen(
                [*command, *imports],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**environ, **_NO_THREADS},
                cwd=os.sep,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # so that Ctrl-C in the terminal reaches only the caller
            )
        weakref.finalize(self, _end_server, self._process, self._control, os.getpid())

    def is_for(self, imports: Sequence[str], environ: Mapping[str, str]) -> bool:
        """Return whether this server can start processes with these imports and environment."""
        if self.forks and self._process.poll() is not None:
            return False  # it was idle and ended itself
        return self._needs == _needs(imports, environ)

    def is_ready(self, timeout: float) -> bool:
        """Wait for the imports, and return whether they are done."""
        if self.refusal is None:
            self._control.settimeout(timeout)
            with contextlib.suppress(TimeoutError):
                said = self._control.recv(4096).decode() or "the server ended while it imported"
                self.refusal = "" if said == READY else said
                if self.refusal:
                    logger.info("every plan starts a new Python: %s", self.refusal)
        return self.refusal is not None

    @property
    def forks(self) -> bool:
        """Return whether the imports are done and forking is safe."""
        return self.refusal == ""

    def hand_over(self, call: Call, streams: Streams, answers: socket.socket) -> None:
        """Make the server fork for a call; it sends `answers` the process id, then the exit code.

        Raises:
            OSError: the server has ended.
        """
        with tempfile.TemporaryFile("w+") as asked:
            json.dump([call.words, call.folder, dict(call.environ)], asked)
            asked.seek(0)
            message = [b"+", os.fsencode(call.scratch)]
            socket.send_fds(self._control, message, [answers.fileno(), asked.fileno(), *streams])


def _needs(imports: Sequence[str], environ: Mapping[str, str]) -> tuple[object, ...]:
    read = {name: value for name, value in environ.items() if not _MAY_DIFFER.fullmatch(name)}
    return (*imports, read)


def _end_server(process: subprocess.Popen[bytes], control: socket.socket, owner_pid: int) -> None:
    if os.getpid() == owner_pid:  # not in a fork of the owner
        control.close()
        process.kill()
        process.wait()


_current: ForkServer | None = None
_lock = threading.Lock()
_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def server_for(imports: Sequence[str], environ: Mapping[str, str]) -> ForkServer:
    """Return the server of this process, starting it if necessary.

    A server with other imports or another environment is replaced.
    """
    global _current
    with _lock:
        if _current is None or not _current.is_for(imports, environ):
            _current = None
            _current = ForkServer(imports, environ)
        return _current


def _socketpair() -> tuple[socket.socket, socket.socket]:
    """Return two connected sockets; the first is closed in every fork of this process.

    Otherwise a fork that outlives this process, such as a data loader, keeps the server alive.
    """
    ours, theirs = socket.socketpair()
    _sockets.add(ours)
    return ours, theirs


def _become_a_fork() -> None:
    global _current, _lock
    for ours in list(_sockets):
        ours.close()
    _current, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_become_a_fork)


class Forked:
    """A process forked by the server; it leads its own process group."""

    def __init__(self, server: ForkServer, call: Call, streams: Streams) -> None:
        self._server = server  # keeps the server from ending first
        self._code: int | None = None
        self._answers, theirs = _socketpair()
        with theirs:
            server.hand_over(call, streams, theirs)
        self.pid = self._read()

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code, or the negative number of the signal that ended the process.

        Raises:
            subprocess.TimeoutExpired: the process is still running.
        """
        if self._code is None:
            self._answers.settimeout(timeout)
            try:
                self._code = self._read()
            except TimeoutError:
                raise subprocess.TimeoutExpired("a forked process", timeout or 0.0) from None
            except ConnectionError:
                kill_group(self.pid)
                self._code = -signal.SIGKILL
            self._answers.close()
        return self._code

    def _read(self) -> int:
        found = self._answers.recv(NUMBER.size)
        if not found:
            raise ConnectionResetError("the server was ended")
        number: int = NUMBER.unpack(found)[0]
        return number
