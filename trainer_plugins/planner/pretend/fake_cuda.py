"""Let fake tensors on a CUDA device have gradients without a card, permanently in this process.

Autograd asks the device's guard and CUDA's hooks. `fake_cuda.cpp` answers both, compiled once for
each torch. Without a compiler, `_by_hand` installs the same answers by the order of virtual
functions, which the headers of a torch fix and nothing promises. Call it before the first backward:
autograd counts its devices once.
"""

import ctypes
import platform
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from trainer_plugins.compiled import (
    cache_folder,
    compiled_once,
    cpp_compiler,
    fingerprint,
    torch_library_command,
)

_SOURCE = Path(__file__).with_name("fake_cuda.cpp")
_TIMEOUT_SECONDS = 120


class NoFakeCuda(RuntimeError):  # noqa: N818 - says a state
    """Says that no fake CUDA device works with this torch."""


def install() -> str:
    """Install the fake device, and prove it by a backward pass; return `compiled` or `by hand`."""
    refusals = []
    for name, way in (("compiled", _compiled), ("by hand", _by_hand)):
        try:
            way()
            break
        except (OSError, AttributeError, RuntimeError, ValueError) as error:
            why = str(error).splitlines()[0] if str(error) else type(error).__name__
            refusals.append(f"{name}: {why}")
    else:
        raise NoFakeCuda(
            f"torch {torch.__version__} does not take a fake CUDA device ({'; '.join(refusals)}): "
            "plan on Linux with a C++ compiler (g++, or the one that CXX names)"
        )
    _prove()
    return name


@cache
def install_once() -> str:
    """Install the fake device if this process has none yet; see `install`."""
    return install()


def _prove() -> None:
    with FakeTensorMode(), torch.device("cuda"):
        weight = torch.nn.Parameter(torch.empty(4, 4))
        hidden = torch.utils.checkpoint.checkpoint(
            torch.nn.functional.linear, torch.empty(2, 4), weight, use_reentrant=False
        )
        hidden.sum().backward()
    if weight.grad is None or weight.grad.device.type != "cuda":
        raise NoFakeCuda(f"torch {torch.__version__} makes no gradient on a fake CUDA device")


def _compiled() -> None:
    compiler = cpp_compiler()
    if compiler is None or platform.system() != "Linux":
        raise OSError("no C++ compiler")
    digest = fingerprint(torch.__version__, _SOURCE.read_bytes())
    file = cache_folder() / f"fake_cuda-torch{torch.__version__}-{digest}.so"
    compiled_once(file, torch_library_command(compiler, _SOURCE), _TIMEOUT_SECONDS)
    ctypes.CDLL(str(file)).trainer_plugins_fake_cuda()


# Numbers of virtual functions in the headers of torch 2.9 to 2.13, after the two of the destructor.
_IS_BUILT, _HAS_PRIMARY_CONTEXT = 2, 4
_CUDA = 1  # c10::DeviceType::CUDA
_MANY = 64  # more virtual functions than either class has


def _by_hand() -> None:
    core: Any = torch._C
    if not hasattr(core, "_ensureCUDADeviceGuardSet"):
        raise RuntimeError("needs torch 2.10, or a C++ compiler")
    root = Path(torch.__file__).parent / "lib"
    c10, torch_cpu = (ctypes.CDLL(str(root / name)) for name in ("libc10.so", "libtorch_cpu.so"))
    # Two C functions that ignore their arguments: one returns 0, the other 1.
    zero = ctypes.cast(ctypes.CDLL(None).sched_yield, ctypes.c_void_p).value
    one = ctypes.cast(ctypes.pythonapi.Py_IsInitialized, ctypes.c_void_p).value
    guards = (ctypes.c_void_p * 21).in_dll(c10, "_ZN3c104impl26device_guard_impl_registryE")
    core._ensureCUDADeviceGuardSet()  # with CUDA and no card, torch removes its own guard
    if not guards[_CUDA]:
        # torch replaces a guard that counts no devices by one that does nothing, but only if there
        # is a guard.
        functions = (ctypes.c_void_p * _MANY)(*[zero] * _MANY)
        guard = (ctypes.c_void_p * 8)(ctypes.addressof(functions))
        _leak(functions, guard)
        guards[_CUDA] = ctypes.addressof(guard)
        core._ensureCUDADeviceGuardSet()
        if guards[_CUDA] == ctypes.addressof(guard):
            guards[_CUDA] = None
            raise RuntimeError("torch did not replace the guard")
    get_hooks = torch_cpu._ZN2at6detail12getCUDAHooksEv
    get_hooks.restype = ctypes.c_void_p
    hooks = ctypes.c_void_p.from_address(get_hooks())
    header = 2  # before the functions: the offset to the top, and the type
    before = (ctypes.c_void_p * (_MANY + header)).from_address(
        (hooks.value or 0) - header * ctypes.sizeof(ctypes.c_void_p)
    )
    after = (ctypes.c_void_p * (_MANY + header))(*before)
    after[header + _IS_BUILT], after[header + _HAS_PRIMARY_CONTEXT] = one, zero
    _leak(after)
    hooks.value = ctypes.addressof(after) + header * ctypes.sizeof(ctypes.c_void_p)
    if core._accelerator_getAccelerator().type != "cuda":
        raise RuntimeError("torch's hooks are laid out otherwise")


def _leak(*objects: object) -> None:
    """Keep objects permanently: static C++ objects use them after the interpreter has ended."""
    for each in objects:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))
