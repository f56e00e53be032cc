"""A server forks what needs its imports; all of it ends with its caller, and an unsafe fork is not made."""

import json
import logging
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests import processes
from trainer_plugins import forks
from trainer_plugins.drycuda.command import _IMPORTS

TELLS = """
import json, os, sys
print(json.dumps({"argv": sys.argv[1:], "folder": os.getcwd(), "path": sys.path[0], "name": __name__,
                  "mark": os.environ.get("MARK"), "parent": os.getppid(), "stdin": sys.stdin.read(),
                  "imported": "calendar" in sys.modules}))
sys.exit(3)
"""
WAITS = """
import os, subprocess
child = subprocess.Popen(["sleep", "infinity"])
print(os.getppid(), os.getpid(), child.pid, flush=True)
child.wait()
"""
HAS_A_THREAD = (
    "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
)


@pytest.fixture(autouse=True)
def _modules(tmp_path):
    (tmp_path / "tells.py").write_text(TELLS)
    (tmp_path / "waits.py").write_text(WAITS)
    (tmp_path / "has_a_thread.py").write_text(HAS_A_THREAD)


def start(folder: Path, server: forks.ForkServer, *words: str, **environ: str):
    """Start a module; return its process and what reads its output, to the end of the last that writes."""
    while not server.is_ready(10):
        pass
    reads, writes = os.pipe()
    call = forks.Call(words=words, folder=str(folder), environ={**os.environ, **environ})
    with open(os.devnull) as nothing:
        process = forks.Forked(server, call, (nothing.fileno(), writes, writes))
    os.close(writes)
    return process, os.fdopen(reads)


def is_alive(pid: int) -> bool:
    """Whether there is such a process, other than as a zombie that waits for whoever has inherited it."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def comes_true(what) -> bool:
    """Whether this is so within two minutes: a process that was killed takes a moment to go."""
    for _ in range(2400):
        if what():
            return True
        select.select([], [], [], 0.05)
    return False


def test_a_forked_process_is_what_python_would_start(tmp_path):
    server = forks.ForkServer(["calendar"], os.environ)
    process, output = start(tmp_path, server, "tells", "--a", "b c", MARK="set")
    said = json.loads(output.read())

    assert process.wait(60) == 3
    parent = said.pop("parent")
    assert psutil.Process(parent).ppid() == os.getpid()
    assert said == {
        "argv": ["--a", "b c"],
        "folder": str(tmp_path),
        "path": str(tmp_path),
        "name": "__main__",
        "mark": "set",
        "stdin": "",
        "imported": True,
    }
    _, output = start(tmp_path, server, "tells")
    assert {"parent": parent, "mark": None, "argv": []}.items() <= json.loads(output.read()).items()


def test_what_ends_takes_its_group_along(tmp_path):
    process, output = start(tmp_path, forks.ForkServer([], os.environ), "waits")
    server, worker, child = map(int, output.readline().split())
    assert worker == process.pid
    assert all(map(is_alive, (server, worker, child)))
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)

    os.kill(worker, signal.SIGKILL)

    assert process.wait() == -signal.SIGKILL
    assert output.read() == ""  # nobody has it open
    assert is_alive(server), "it serves other calls"


def test_a_server_that_is_killed_takes_along_what_it_has_forked(tmp_path):
    process, output = start(tmp_path, forks.ForkServer([], os.environ), "waits")
    os.kill(int(output.readline().split()[0]), signal.SIGKILL)

    assert process.wait(60) == -signal.SIGKILL
    assert output.read() == ""


OWNER = """
import os, sys
from trainer_plugins import forks
folder = sys.argv[1]
environ = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path[1:], folder])}
server = forks.server_for([], environ)
while not server.is_ready(10):
    pass
os.mkdir(f"{folder}/scratch")
call = forks.Call(words=("waits",), folder=folder, environ=environ, scratch=f"{folder}/scratch")
with open(os.devnull) as nothing:
    process = forks.Forked(server, call, (nothing.fileno(), 1, 1))
fork = os.fork()
if fork == 0:  # it goes on, as a data loader's worker might
    os.close(1)
    open(f"{folder}/never").read()
os.write(2, f"{fork}\\n".encode())
process.wait()
"""


def test_all_of_it_ends_with_a_caller_that_is_killed(tmp_path):
    os.mkfifo(tmp_path / "never")
    owner = processes.start(
        [sys.executable, "-c", OWNER, str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=Path(__file__).parent.parent,
        fresh="it is the parent of what it starts",
    )
    assert owner.stdout is not None
    assert owner.stderr is not None
    parent, worker, child = map(int, owner.stdout.readline().split())
    fork = int(owner.stderr.readline())
    assert all(map(is_alive, (parent, worker, child, fork)))
    assert (tmp_path / "scratch").exists()

    owner.kill()

    assert owner.stdout.read() == b""
    assert comes_true(lambda: not (tmp_path / "scratch").exists())
    assert comes_true(lambda: not is_alive(parent))
    assert is_alive(fork), "it has kept nothing of it alive"
    processes.kill(owner)


def test_an_environment_that_imports_see_has_a_server_of_its_own():
    first = forks.server_for([], os.environ)
    assert forks.server_for([], {**os.environ, "TMPDIR": "/elsewhere", "RANK": "1"}) is first
    elsewhere = {**os.environ, "HF_HOME": "/elsewhere"}
    other = forks.server_for([], elsewhere)
    assert other is not first
    assert forks.server_for([], elsewhere) is other
    assert forks.server_for(["calendar"], elsewhere) is not other


def test_a_server_ends_with_the_last_reference(tmp_path):
    server = forks.ForkServer([], os.environ)
    process, output = start(tmp_path, server, "waits")
    pid = int(output.readline().split()[0])
    del server
    assert is_alive(pid), "it has forked what still runs"
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    del process
    assert not psutil.pid_exists(pid)


def test_a_server_that_was_idle_has_ended_and_is_replaced(tmp_path):
    server = forks.server_for([], os.environ)
    _, output = start(tmp_path, server, "tells")
    pid = json.loads(output.read())["parent"]
    assert forks.server_for([], os.environ) is server
    os.kill(pid, signal.SIGTERM)  # as after a minute
    assert comes_true(lambda: not is_alive(pid))

    with pytest.raises(OSError, match=r"Broken pipe|reset"):
        start(tmp_path, server, "tells")  # it did not know yet
    assert forks.server_for([], os.environ) is not server


def test_an_idle_server_ends():
    code = """
import socket, sys
from trainer_plugins.forks import server
server._IDLE_SECONDS = 0.01
ours, theirs = socket.socketpair()
sys.argv = ["", str(theirs.detach())]
server.serve()
assert ours.recv(100).decode() == server.READY
"""
    call = [sys.executable, "-c", code]
    done = processes.run(call, cwd=Path(__file__).parent.parent, fresh="it becomes a server")
    assert done.returncode == 0, done.stderr


def test_a_fork_of_imports_with_threads_is_not_safe(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parent.parent)])
    server = forks.ForkServer(["has_a_thread"], {**os.environ, "PYTHONPATH": path})
    while not server.is_ready(10):
        pass
    assert not server.forks
    (line,) = (record.message for record in caplog.records if record.name == forks.__name__)
    assert "the imports started threads" in line


READS = """
import importlib, os, sys
read = {}
def watched(name):
    found = getattr(type(os.environ), name)
    def watch(self, key):
        caller = sys._getframe(1)
        while caller.f_code.co_filename in (os.__file__, "<frozen os>", "<frozen _collections_abc>", "<string>"):
            caller = caller.f_back
        read.setdefault(key, []).append(caller.f_code.co_filename)
        return found(self, key)
    setattr(type(os.environ), name, watch)
watched("__getitem__")
watched("__contains__")
for module in sys.argv[1:]:
    try:
        importlib.import_module(module)
    except ImportError:
        pass
# these two look at all names for their own
own = ("/tqdm/utils.py", "/fsspec/config.py")
print(*[name for name, files in read.items() if any(not file.endswith(own) for file in files)])
"""


@pytest.mark.all
def test_no_import_reads_what_may_differ():
    """Three are read, and no harm: a fork looks for its own TMPDIR, and of the others defaults are set."""
    environ = {**os.environ, "MASTER_ADDR": "localhost", "RANK": "0", "CUDA_VISIBLE_DEVICES": ""}
    call = [sys.executable, "-c", READS, *_IMPORTS]
    done = processes.run(call, environ=environ, fresh="what it imports is the point")
    read = done.stdout.split()
    assert len(read) > 200, done.stderr
    assert {name for name in read if forks._MAY_DIFFER.fullmatch(name)} <= {
        "TMPDIR",
        "TORCHINDUCTOR_CACHE_DIR",
        "PYTORCH_NVML_BASED_CUDA_CHECK",
    }
