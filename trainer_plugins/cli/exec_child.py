"""Run a command as a child that behaves as if it had replaced this process."""

import ctypes
import os
import resource
import signal
import subprocess
from collections.abc import Mapping
from contextlib import suppress

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_NOT_TO_PASS_ON = {
    *(signal.SIGKILL, signal.SIGSTOP),  # no process can block these
    *(signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU, signal.SIGCONT),  # left to the shell
    *(signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGPIPE),
}


def run_as_child(words: list[str], environ: Mapping[str, str]) -> int:
    """Run a command, forward signals to it, and return its exit code; -N if signal N ended it.

    Signals from the terminal or the kernel reach the command directly. If this process is killed,
    the kernel kills the command.

    Raises:
        OSError: the command cannot be run.
    """
    if not hasattr(signal, "sigwaitinfo"):  # on macOS it replaces this process
        os.execvpe(words[0], words, environ)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    ignored = {each for each in signal.valid_signals() if signal.getsignal(each) is signal.SIG_IGN}
    passed_on = signal.valid_signals() - ignored - _NOT_TO_PASS_ON
    # Blocked until this process ends: a signal that also reaches it must not cut off its last line.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, passed_on)
    libc, parent = ctypes.CDLL(None), os.getpid()

    def prepare() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(128 + signal.SIGKILL)

    # As after `execve`, the command inherits this process's descriptors.
    child = subprocess.Popen(words, env=environ, close_fds=False, preexec_fn=prepare)
    while (code := child.poll()) is None:
        received = signal.sigwaitinfo(passed_on)
        if received.si_signo != signal.SIGCHLD and received.si_code <= 0:  # sent by a process
            child.send_signal(received.si_signo)
    return code


def end_as(code: int) -> None:
    """End this process as the command ended, even if by a signal."""
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the command has left its own core dump
        with suppress(OSError):  # SIGKILL cannot be reset
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
        os.kill(os.getpid(), -code)
    raise SystemExit(code)
