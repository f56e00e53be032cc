"""Build the C++ half of simgpu, once for each torch, and load it."""

import ctypes
import functools
import platform
from pathlib import Path

from trainer_plugins import compiled

_SOURCES = Path(__file__).parent
_CARD_FILE = _SOURCES.parent / "card_file.h"
_SETTERS = {
    "simgpu_expandable": ctypes.c_int,
    "simgpu_fail_at": ctypes.c_uint64,
    "simgpu_limit": ctypes.c_uint64,
}  # functions that set one number, each with its type


class SimgpuUnavailable(RuntimeError):  # noqa: N818 - it names a state, as is_available does
    """simgpu cannot be built or loaded here; the message names what is missing in one line."""


def unavailable_reason() -> str | None:
    """Return why simgpu cannot run here; None if it can. Builds it if necessary."""
    try:
        built_library()
    except SimgpuUnavailable as error:
        return str(error)
    return None


@functools.cache
def built_library() -> Path:
    """Return the library for this torch, built unless cached, or raise SimgpuUnavailable."""
    import torch

    if platform.system() != "Linux":
        raise SimgpuUnavailable(f"simgpu runs on Linux only, this is {platform.system()}")
    compiler = compiled.cpp_compiler()
    # A build depends on torch, architecture, C library and sources.
    sources = sorted([*_SOURCES.glob("*.h"), *_SOURCES.glob("*.cpp"), _CARD_FILE, Path(__file__)])
    contents = [path.read_bytes() for path in sources]
    name = compiled.fingerprint(torch.__version__, platform.libc_ver()[0], *contents)
    library = compiled.cache_folder() / f"simgpu-torch{torch.__version__}-{name}.so"
    if compiler is None and not library.exists():
        raise SimgpuUnavailable("simgpu needs a C++ compiler: install g++ or set CXX")
    major, minor = torch.__version__.split(".")[:2]
    version = f"-DSIMGPU_TORCH_VERSION={int(major) * 100 + int(minor)}"
    command = compiled.torch_library_command(compiler or "", _SOURCES / "backend.cpp", version)
    try:
        return compiled.compile_once(library, command)
    except compiled.CompileError as error:
        raise SimgpuUnavailable(
            f"simgpu cannot be built for torch {torch.__version__}: {error}"
        ) from error
    except OSError as error:
        raise SimgpuUnavailable(
            f"simgpu cannot write to its cache, set TRAINER_PLUGINS_CACHE: {error}"
        ) from error


def load() -> ctypes.CDLL:
    """Load the library, which registers its kernels with torch, or raise SimgpuUnavailable."""
    library = ctypes.CDLL(str(built_library()))
    library.simgpu_last_error.restype = ctypes.c_char_p
    library.simgpu_num_allocations.restype = ctypes.c_uint64
    library.simgpu_attach_card.argtypes = [ctypes.c_char_p, ctypes.c_char_p]
    library.simgpu_finish_backward.restype = None
    for name, kind in _SETTERS.items():
        setter = getattr(library, name)
        setter.argtypes, setter.restype = [kind], None
    return library
