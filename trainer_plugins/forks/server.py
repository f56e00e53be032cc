"""The process that imports modules, then forks for each call."""

import contextlib
import gc
import importlib
import json
import os
import runpy
import selectors
import shutil
import signal
import socket
import struct
import sys
import tempfile
from collections.abc import Sequence

READY = "ready"
NUMBER = struct.Struct("=i")
_IDLE_SECONDS = 60.0
"""An idle server holds about 400 MiB of main memory, which the planned training may need."""


def kill_group(leader: int) -> None:
    """Kill a process and its group, if they are still running."""
    for kill in (os.killpg, os.kill):  # a process that was just forked does not lead a group yet
        with contextlib.suppress(ProcessLookupError):
            kill(leader, signal.SIGKILL)


def serve() -> None:
    """Import modules, then fork for each call: `python -c CODE SOCKET MODULES`.

    In a forked process this returns when its module has ended.
    """
    control = socket.socket(fileno=int(sys.argv[1]))
    gc.disable()  # collections take a seventh of the import time and find nothing
    reason = _import(sys.argv[2:])
    control.sendall((reason or READY).encode())
    if reason:
        return
    gc.collect()
    gc.freeze()  # a collection would write to shared pages
    gc.enable()
    received = _Server(control).answer()
    if received is not None:
        _run(*received[2:])


def _import(modules: Sequence[str]) -> str:
    """Import modules; return why this process must not fork afterwards (empty if it may)."""
    for module in modules:
        with contextlib.suppress(ImportError):  # a forked module that needs it raises it again
            importlib.import_module(module)
    if "torch" in sys.modules and sys.modules["torch"].cuda.is_initialized():
        return "the imports initialised CUDA"
    return "the imports started threads" if len(os.listdir("/proc/self/task")) > 1 else ""


# A call: the folder to delete, and file descriptors for the answers, the question and the streams.
_Received = tuple[bytes, int, int, list[int]]


class _Server:
    """Forks for each call; sends the caller the process id and, at the end, the exit code.

    Each call comes with a connection. If the caller closes it or dies, the server kills the child
    and deletes its folder.
    """

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._children: dict[socket.socket, tuple[int, bytes]] = {}  # process id, folder
        self._bell, self._ring = socket.socketpair()
        self._bell.setblocking(False)
        self._ring.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # the wakeup fd needs a handler
        signal.set_wakeup_fd(self._ring.fileno())
        self._waits = selectors.DefaultSelector()
        self._waits.register(control, selectors.EVENT_READ)
        self._waits.register(self._bell, selectors.EVENT_READ)

    def answer(self) -> _Received | None:
        """Return the received call in each child, and None in the server when it ends."""
        has_caller = True
        while has_caller or self._children:
            ready = self._waits.select(None if self._children else _IDLE_SECONDS)
            if not ready:
                return None
            for source in [key.fileobj for key, _ in ready]:
                if source is self._bell:
                    self._bell.recv(4096)
                elif source in self._children:
                    self._waits.unregister(source)
                    kill_group(self._children[source][0])
                elif (received := _receive(self._control)) is None:
                    self._waits.unregister(self._control)
                    has_caller = False
                elif self._fork(*received):
                    return received
            self._tell_of_ends()
        return None

    def _fork(self, scratch: bytes, answering: int, asked: int, streams: list[int]) -> bool:
        """Fork; return whether this process is the child."""
        answers = socket.socket(fileno=answering)
        try:
            pid = os.fork()
        except OSError:  # too many processes: the caller sees the connection close
            pid = -1
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._waits.close()
            for each in (answers, self._control, self._bell, self._ring, *self._children):
                each.close()
            return True
        for fd in (asked, *streams):
            os.close(fd)
        if pid == -1:
            answers.close()
            return False
        self._children[answers] = pid, scratch
        self._waits.register(answers, selectors.EVENT_READ)
        _tell(answers, pid)
        return False

    def _tell_of_ends(self) -> None:
        """Report children that have ended, and kill the processes they left running."""
        for answers, (pid, scratch) in list(self._children.items()):
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                continue
            kill_group(pid)  # while it is a zombie, so that its number is not reused
            _, status = os.waitpid(pid, 0)
            if answers in self._waits.get_map():
                self._waits.unregister(answers)
            elif scratch:
                shutil.rmtree(scratch, ignore_errors=True)
            _tell(answers, os.waitstatus_to_exitcode(status))
            answers.close()
            del self._children[answers]


def _receive(control: socket.socket) -> _Received | None:
    message, fds, _, _ = socket.recv_fds(control, 1 << 16, 5)
    if not message:
        return None
    answers, asked, *streams = fds
    return message[1:], answers, asked, streams


def _tell(answers: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # the caller has ended
        answers.sendall(NUMBER.pack(number))


def _run(question: int, streams: list[int]) -> None:
    """Turn into the process that `python -m` would have started, and run its module."""
    os.setsid()
    with open(question) as asked:
        words, folder, environ = json.load(asked)
    for number, fd in enumerate(streams):
        os.dup2(fd, number)
        os.close(fd)
    os.environ.clear()
    os.environ.update(environ)
    tempfile.tempdir = None  # it was the server's
    os.chdir(folder)
    sys.path.insert(0, folder)
    sys.argv = words
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)
