"""Takes the calls of shims to the server that has made its imports in such an environment."""

import atexit
import json
import os
import shutil
import socket
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from tests.forked import MARK, ROOT, SHIM, TELL_TO
from trainer_plugins.forks import Call, Forked, ForkServer, Streams

_READ_BY_LIBRARIES = """
    LD_LIBRARY_PATH LD_PRELOAD OMP_NUM_THREADS GOMP_CPU_AFFINITY OMP_WAIT_POLICY MKL_NUM_THREADS
    OPENBLAS_NUM_THREADS ATEN_CPU_CAPABILITY ONEDNN_MAX_CPU_ISA ONEDNN_DEFAULT_FPMATH_MODE
    MALLOC_ARENA_MAX MALLOC_TRIM_THRESHOLD_ MALLOC_MMAP_THRESHOLD_ TORCH_CPP_LOG_LEVEL
    TORCH_SHOW_CPP_STACKTRACES
    TORCH_DISTRIBUTED_DEBUG PYTHONUNBUFFERED PYTHONHASHSEED PYTHONWARNINGS PYTHONUTF8
    PYTHONIOENCODING PYTHONSAFEPATH PYTHONOPTIMIZE PYTHONNOUSERSITE PYTHONDEVMODE PYTHONHOME
""".split()  # noqa: SIM905
"""What Python and native code read as they are loaded, of what tests could set."""

_ON_CUDA = ("CUDA_VISIBLE_DEVICES", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_READ_AGAIN = {
    "TMPDIR",
    "TORCHINDUCTOR_CACHE_DIR",
    "PYTORCH_NVML_BASED_CUDA_CHECK",
    "CXX",
    "OPENBLAS_NUM_THREADS",
    TELL_TO,
}
_OPTIONS = ("-", "-c", "-m", "-u", "-X")
_MOST_SERVERS = 3

Seen = dict[str, str | None]
"""The variables that imports read."""


class Relay:
    """Listens in a thread of its own, and has a server for each environment that is asked for twice."""

    def __init__(self) -> None:
        folder = Path(tempfile.mkdtemp(prefix="forked-"))  # may stand in PATH
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        self.python = folder / "python"
        text = (Path(__file__).parent / "shim.py").read_text()
        filled = text.replace("{socket}", f"{folder}/socket").replace("{python}", sys.executable)
        self.python.write_text(f"#!{sys.executable} -IS\n{filled}")
        self.python.chmod(0o755)
        for name in ("python3", "accelerate", "torchrun", "trainer-plugins"):
            (folder / name).symlink_to(self.python)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(f"{folder}/socket")
        self._listener.listen(64)
        self._told = folder / "read"
        self._read = {*_READ_BY_LIBRARIES, *(_ON_CUDA if torch.version.cuda else ())}
        self._servers: list[tuple[Mapping[str, str], ForkServer]] = []
        self._missed: Counter[str] = Counter()
        self._waits: list[Forked] = []
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            shim, _ = self._listener.accept()
            _, (asked, *fds), *_ = socket.recv_fds(shim, 1, 4)
            with shim, open(asked) as file:
                file.seek(0)
                words, folder, environ = json.load(file)
                call = Call(words=(*words,), folder=folder, environ=environ)
                try:
                    reason = self._fork(call, (fds[0], fds[1], fds[2]), shim)
                except Exception as error:  # noqa: BLE001 - a new Python does as well
                    reason = repr(error)
                if log := os.environ.get("FORKED_LOG"):
                    with open(log, "a") as said:
                        test = os.environ.get("PYTEST_CURRENT_TEST")
                        said.write(f"{reason or 'fork'}\t{test}\t{words}\n")
            for fd in fds:
                os.close(fd)

    def _fork(self, call: Call, streams: Streams, shim: socket.socket) -> str:
        """Have a server fork for a call; return why it is left to a new Python, if it is."""
        if reason := self._reason_for_a_new_python(call.words, call.environ):
            return reason
        server = self._server_for(self._seen(call.environ))
        assert server is not None
        words = ("tests.forked.as_python", *call.words)
        environ = {**call.environ, SHIM: str(self.python)}
        server.hand_over(call._replace(words=words, environ=environ), streams, shim)
        return ""

    def _reason_for_a_new_python(self, words: Sequence[str], environ: Mapping[str, str]) -> str:
        """Return why no server can fork for this call; start one if that is all it lacks."""
        if not words or (words[0].startswith("-") and words[0] not in _OPTIONS):
            return f"options: {words[:1]}"
        if words[0] == "-X" and words[1] != "faulthandler":
            return f"-X {words[1]}"
        for folder in filter(None, environ.get("PYTHONPATH", "").split(os.pathsep)):
            if not _has_only_scripts(folder):
                return f"modules of {folder}"
        if not self._servers:
            self._start(environ)
        seen = self._seen(environ)
        if self._server_for(seen) is None:
            self._missed[str(seen)] += 1
            if self._missed[str(seen)] == 1 or len(self._servers) == _MOST_SERVERS:
                other, _ = self._servers[0]
                return (
                    f"environment: {[name for name in self._read if other.get(name) != seen[name]]}"
                )
            self._start(environ)
        server = self._server_for(seen)
        assert server is not None
        return "" if server.forks else f"{server.refusal}"

    def _seen(self, environ: Mapping[str, str]) -> Seen:
        return {name: environ.get(name) for name in sorted(self._read)}

    def _server_for(self, seen: Seen) -> ForkServer | None:
        for environ, server in self._servers:
            if all(environ.get(name) == value for name, value in seen.items()):
                return server
        return None

    def _start(self, environ: Mapping[str, str]) -> None:
        environ = {name: value for name, value in environ.items() if name != MARK}
        needed = {**environ, TELL_TO: str(self._told), "PYTHONPATH": ROOT}
        server = ForkServer(["tests.forked.preloaded"], needed)
        while not server.is_ready(60):
            pass
        self._read |= {*json.loads(self._told.read_text())} - _READ_AGAIN
        self._servers.append((environ, server))
        # without a child it would end after a minute
        words = ("tests.forked.as_python", "-c", "import os; os.read(0, 1)")
        reads, self._never = os.pipe()
        waits = Call(words=words, folder=ROOT, environ={**environ, SHIM: str(self.python)})
        self._waits.append(Forked(server, waits, (reads, 2, 2)))


def _has_only_scripts(folder: str) -> bool:
    """Whether a folder of PYTHONPATH is the repository's, or has nothing that imports could look for."""
    if folder == ROOT or not os.path.isdir(folder) or folder in sys.path:
        return True
    tops = {name.partition(".")[0] for name in sys.modules} | {"sitecustomize", "usercustomize"}
    return not any(
        (each.is_dir() and any(each.glob("*.py")))
        or each.suffix == ".dist-info"
        or (each.suffix in (".py", ".so") and each.stem in tops)
        for each in Path(folder).iterdir()
    )
