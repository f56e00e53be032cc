"""Building the C++ half of simgpu, once for each torch, and loading it."""

import ctypes
import fcntl
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

_SOURCES = Path(__file__).parent
_TIMEOUT_SECONDS = 600


class SimgpuUnavailable(RuntimeError):  # noqa: N818 - says a state, as torch.cuda.is_available does
    """simgpu cannot be built or loaded here; the text names what is missing in one line."""


def unavailable_reason() -> str | None:
    """Say why simgpu cannot run here, or None where it can.

    Builds it where that has not been done, which takes ten seconds or so; imports torch.
    """
    try:
        built_library()
    except SimgpuUnavailable as error:
        return str(error)
    return None


@functools.cache
def built_library() -> Path:
    """Return the shared library for this torch, building it where it is not in the cache.

    Raises:
        SimgpuUnavailable: no torch, no C++ compiler, or the build failed.
    """
    try:
        import torch
    except ImportError as error:
        raise SimgpuUnavailable(f"simgpu needs PyTorch: {error}") from error
    if platform.system() != "Linux":
        raise SimgpuUnavailable(f"simgpu runs on Linux only, this is {platform.system()}")
    cache = Path(
        os.environ.get("TRAINER_PLUGINS_CACHE") or Path.home() / ".cache" / "trainer_plugins"
    )
    library = cache / f"simgpu-{_fingerprint(torch.__version__)}.so"
    if library.exists():
        return library
    compiler = (
        os.environ.get("CXX")
        or shutil.which("g++")
        or shutil.which("clang++")
        or shutil.which("c++")
    )
    if compiler is None:
        raise SimgpuUnavailable("simgpu needs a C++ compiler: install g++ or set CXX")
    try:
        cache.mkdir(parents=True, exist_ok=True)
        lock = (cache / "simgpu.lock").open("w")
    except OSError as error:
        raise SimgpuUnavailable(
            f"simgpu cannot write to its cache, set TRAINER_PLUGINS_CACHE: {error}"
        ) from error
    with lock:
        fcntl.flock(
            lock, fcntl.LOCK_EX
        )  # one of the ranks or pytest workers builds, the others wait for it
        if not library.exists():
            _build(compiler, library)
    return library


def load() -> ctypes.CDLL:
    """Load the library into this process, which makes torch know its kernels.

    Raises:
        SimgpuUnavailable: it cannot be built or loaded.
    """
    path = built_library()
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise SimgpuUnavailable(
            f"simgpu cannot load {path}, remove it to build it anew: {error}"
        ) from error
    library.simgpu_last_error.restype = ctypes.c_char_p
    library.simgpu_num_allocations.restype = ctypes.c_uint64
    library.simgpu_finish_backward.restype = None
    library.simgpu_fail_at.argtypes = [ctypes.c_uint64]
    library.simgpu_fail_at.restype = None
    library.simgpu_attach_card.argtypes = [ctypes.c_char_p, ctypes.c_char_p]
    return library


def _fingerprint(torch_version: str) -> str:
    """Name the build: another torch, another CPU architecture or other sources are another build."""
    digest = hashlib.sha256()
    for text in (torch_version, platform.machine(), platform.libc_ver()[0]):
        digest.update(text.encode() + b"\0")
    for path in sorted([*_SOURCES.glob("*.h"), *_SOURCES.glob("*.cpp"), Path(__file__)]):
        digest.update(path.read_bytes())
    return f"torch{torch_version}-{digest.hexdigest()[:16]}"


def _build(compiler: str, library: Path) -> None:
    import torch

    root = Path(torch.__file__).parent
    major, minor = torch.__version__.split(".")[:2]
    with tempfile.TemporaryDirectory(dir=library.parent) as directory:
        draft = Path(directory) / library.name
        command = [
            *(compiler.split()),
            "-std=c++20",
            # half as long to compile as -O2; the time of a run goes into torch's kernels, not into
            # this
            "-O1",
            "-fPIC",
            "-shared",
            "-w",  # torch's headers warn, and nobody reads it
            f"-DSIMGPU_TORCH_VERSION={int(major) * 100 + int(minor)}",
            f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
            f"-I{root / 'include'}",
            f"-I{root / 'include/torch/csrc/api/include'}",
            str(_SOURCES / "backend.cpp"),
            f"-L{root / 'lib'}",
            "-lc10",
            "-ltorch_cpu",
            "-o",
            str(draft),
        ]
        log = library.with_suffix(".log")
        try:
            result = subprocess.run(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                check=False,
                timeout=_TIMEOUT_SECONDS,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise SimgpuUnavailable(f"simgpu cannot be built: {error}") from error
        if result.returncode != 0:
            log.write_bytes(" ".join(command).encode() + b"\n" + result.stdout)
            raise SimgpuUnavailable(
                f"simgpu cannot be built for torch {torch.__version__}, see {log}"
            )
        draft.replace(library)  # whole or not at all
