"""Stands for `python`: hands its call and its streams to a server, and ends as the fork there does.

By another name it stands for the script of that name beside Python, as `accelerate`. `relay.py` fills
in the two paths. If no server can fork for it, or it inherits more files, it becomes a real Python.
"""

import json
import os
import signal
import socket
import struct
import sys

SOCKET, PYTHON = "{socket}", "{python}"


def receive(server: socket.socket) -> int | None:
    found = server.recv(4)
    return struct.unpack("=i", found)[0] if found else None


def open_files() -> list[int]:
    """The standard streams, and what else the caller lets a child inherit."""
    fds = sorted(map(int, os.listdir("/proc/self/fd")))  # and that of listing them
    return [fd for fd in fds if os.path.exists(f"/proc/self/fd/{fd}") and os.get_inheritable(fd)]


def main() -> None:
    name = os.path.basename(sys.argv[0])
    script = [] if name.startswith("python") else [os.path.join(os.path.dirname(PYTHON), name)]
    words = [*script, *sys.argv[1:]]
    fds = open_files()
    if fds != [0, 1, 2]:
        os.execv(PYTHON, [PYTHON, *words])
    server = socket.socket(socket.AF_UNIX)
    pid = None
    try:
        server.connect(SOCKET)
        with open(os.memfd_create("asked"), "w") as asked:
            json.dump([words, os.getcwd(), dict(os.environ)], asked)
            asked.flush()
            socket.send_fds(server, [b"+"], [asked.fileno(), *fds])
        pid = receive(server)
    except OSError:
        pass
    if pid is None:
        os.execv(PYTHON, [PYTHON, *words])
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda number, _: os.kill(pid, number))
    for fd in fds:  # the fork has them: who reads from it sees its end
        os.close(fd)
    code = receive(server)
    if code is None:
        code = -signal.SIGKILL
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    main()
