"""Compile C and C++ once, never at import, and keep the result in the package's cache folder."""

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Literal


class CompileError(RuntimeError):
    """The compiler could not be run, or it failed."""

    def __init__(self, message: str, output: str = "") -> None:
        super().__init__(message)
        self.output = output  # the compiler's output; empty if it could not be run


def cache_folder() -> Path:
    """Return `$TRAINER_PLUGINS_CACHE`, else `$XDG_CACHE_HOME/trainer_plugins`, else in `~/.cache`.

    A relative XDG_CACHE_HOME is ignored, as the XDG Base Directory Specification says.
    """
    if chosen := os.environ.get("TRAINER_PLUGINS_CACHE"):
        return Path(chosen)
    shared = Path(os.environ.get("XDG_CACHE_HOME", ""))
    caches = shared if shared.is_absolute() else Path.home() / ".cache"
    return caches / "trainer_plugins"


def package_site() -> Path:
    """Return the folder for packages that we fetch because they are not installed."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return cache_folder().absolute() / "packages" / f"python{python}"


def cpp_compiler() -> str | None:
    """Return the command of a C++ compiler, $CXX if set; None if there is none."""
    installed = shutil.which("g++") or shutil.which("clang++") or shutil.which("c++")
    return os.environ.get("CXX") or installed


def plain_compiler(language: Literal["cc", "c++"]) -> list[str]:
    """Return the command of a compiler for code without C++ libraries; empty if there is none.

    If no compiler is installed it may be zig, from the package `ziglang`, installed or fetched. Zig
    has its own C++ library, so it cannot compile code that calls torch's C++.
    """
    if language == "c++":
        installed = (cpp_compiler() or "").split()
    else:
        installed = [each for each in map(shutil.which, ("cc", "gcc", "clang")) if each][:1]
    if installed:
        return installed
    if find_spec("ziglang"):
        return [sys.executable, "-m", "ziglang", language]
    fetched = package_site() / "ziglang" / "zig"
    return [str(fetched), language] if fetched.is_file() else []


def fingerprint(*parts: str | bytes) -> str:
    """Return 16 characters that identify a build by its parts, machine and compiler flags."""
    digest = hashlib.sha256()
    for part in (platform.machine(), Path(__file__).read_bytes(), *parts):
        digest.update((part.encode() if isinstance(part, str) else part) + b"\0")
    return digest.hexdigest()[:16]


def torch_library_command(compiler: str, source: Path, *flags: str) -> list[str]:
    """Return the command for a C++ source that links to torch; -O1 takes half of -O2's time."""
    import torch

    root = Path(torch.__file__).parent
    return [
        *compiler.split(),
        "-std=c++20",
        "-O1",
        "-fPIC",
        "-shared",
        "-w",  # torch's headers have warnings that we cannot fix
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *flags,
        f"-I{root / 'include'}",
        f"-I{root / 'include/torch/csrc/api/include'}",
        str(source),
        f"-L{root / 'lib'}",
        "-lc10",
        "-ltorch_cpu",
    ]


def compile_once(library: Path, command: Sequence[str], timeout_seconds: float = 600) -> Path:
    """Run `command` with `-o library` unless the library exists, and return the library's path.

    One process builds while the others wait. The library appears complete or not at all. If the
    compiler fails, CompileError is raised and a `.log` file beside the library has command and
    output.
    """
    if library.exists():
        return library
    library.parent.mkdir(parents=True, exist_ok=True)
    with lock(library.parent):
        if not library.exists():
            _compile(library, command, timeout_seconds)
    return library


@contextmanager
def lock(folder: Path) -> Iterator[None]:
    """Lock a folder against other processes; skip it if that is impossible, as on some NFS."""
    import fcntl  # not on Windows

    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _compile(library: Path, command: Sequence[str], timeout_seconds: float) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent) as directory:
        draft = Path(directory) / library.name
        command = [*command, "-o", str(draft)]
        try:
            result = subprocess.run(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                check=False,
                timeout=timeout_seconds,
                # Its own temporary files are removed there if it is interrupted.
                env={**os.environ, "TMPDIR": directory},
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise CompileError(str(error)) from error
        if result.returncode:
            log = library.with_suffix(".log")
            log.write_bytes(" ".join(command).encode() + b"\n" + result.stdout)
            raise CompileError(
                f"the compiler failed, see {log}", result.stdout.decode(errors="replace")
            )
        draft.replace(library)
