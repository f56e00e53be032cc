"""Compiles C and C++ once and keeps the result; decides where the package's cache folder is.

Nothing is compiled at import, and torch is imported only for the flags of a library against it.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

_C_COMPILERS = ("cc", "gcc", "clang")
_CPP_COMPILERS = ("g++", "clang++", "c++")


class CompileError(RuntimeError):
    """The compiler could not be run, or it failed."""

    def __init__(self, message: str, output: str = "") -> None:
        super().__init__(message)
        self.output = output
        """What the compiler printed; empty if it could not be run."""


def cache_folder() -> Path:
    """Return the folder for what is built or measured once: `$TRAINER_PLUGINS_CACHE`, or a default.

    The default is `~/.cache/trainer_plugins`.
    """
    return Path(
        os.environ.get("TRAINER_PLUGINS_CACHE") or Path.home() / ".cache" / "trainer_plugins"
    )


def c_compiler() -> str | None:
    """Return the path of a C compiler; None if there is none."""
    return next(filter(None, map(shutil.which, _C_COMPILERS)), None)


def cpp_compiler() -> str | None:
    """Return the command of a C++ compiler, the one in CXX first; None if there is none."""
    return os.environ.get("CXX") or next(filter(None, map(shutil.which, _CPP_COMPILERS)), None)


def fingerprint(*parts: str | bytes) -> str:
    """Return 16 characters that name a build by all that it depends on.

    The machine's architecture and this file, which has the flags, always count.
    """
    digest = hashlib.sha256()
    for part in (platform.machine(), Path(__file__).read_bytes(), *parts):
        digest.update((part.encode() if isinstance(part, str) else part) + b"\0")
    return digest.hexdigest()[:16]


def torch_library_command(compiler: str, source: Path, *flags: str) -> list[str]:
    """Return the command that compiles a C++ source into a library for the installed torch.

    -O1 takes half as long as -O2 to compile, and a run spends its time in torch's kernels.
    """
    import torch

    root = Path(torch.__file__).parent
    return [
        *compiler.split(),
        *("-std=c++20", "-O1", "-fPIC", "-shared"),
        "-w",  # torch's headers have warnings, which nobody here can fix
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *flags,
        *(f"-I{root / 'include'}", f"-I{root / 'include/torch/csrc/api/include'}"),
        *(str(source), f"-L{root / 'lib'}", "-lc10", "-ltorch_cpu"),
    ]


def compiled_once(library: Path, command: Sequence[str], timeout_seconds: float) -> Path:
    """Run a compiler unless its library exists, and return the library's path.

    One process builds, the others wait for it. The library appears whole or not at all. If the
    compiler fails, its command and what it printed are in a `.log` file beside the library.

    Args:
        library: the file to create; its folders are created if necessary.
        command: the compiler's command without the output file, which is given as `-o`.
        timeout_seconds: how long the compiler may take.

    Raises:
        OSError: the folder cannot be written.
        CompileError: the compiler cannot be run, takes too long, or fails.
    """
    if library.exists():
        return library
    library.parent.mkdir(parents=True, exist_ok=True)
    with _locked(library.parent):
        if not library.exists():
            _compile(library, command, timeout_seconds)
    return library


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock a folder against other builders, without leaving a file behind.

    Some file systems, such as NFS, cannot lock a folder. Then several may build at once, and each
    puts a whole library in place.
    """
    import fcntl

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
        whole = [*command, "-o", str(draft)]
        try:
            result = subprocess.run(
                whole,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                check=False,
                timeout=timeout_seconds,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise CompileError(str(error)) from error
        if result.returncode:
            log = library.with_suffix(".log")
            log.write_bytes(" ".join(whole).encode() + b"\n" + result.stdout)
            raise CompileError(
                f"the compiler failed, see {log}", result.stdout.decode(errors="replace")
            )
        draft.replace(library)
