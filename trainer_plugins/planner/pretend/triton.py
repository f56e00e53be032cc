"""Let Python that is written around Triton's kernels run without Triton and without a card.

A kernel of Triton gets tensors that torch has made, and takes nothing from the allocator itself. So
the code around kernels says what they need, and the kernels may do nothing: Liger's
(liger_kernel/ops) are such.
"""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

_NAME = "triton"


def kernels_do_nothing() -> None:
    """Let a stand-in be imported wherever Triton is asked for, in this process and for good.

    That is so too where Triton is installed. Modules that have imported it already keep it.
    """
    for name in list(sys.modules):
        if _is_triton(name):
            del sys.modules[name]
    sys.meta_path.insert(0, _Finder())


def _is_triton(name: str) -> bool:
    return name.partition(".")[0] == _NAME


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a stand-in for Triton and each of its modules."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not _is_triton(name):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ != _NAME:
            return
        vars(module).update(
            __version__="3.0.0",  # that of no kernel's special case
            jit=_jit,
            autotune=lambda *_, **__: _jit,
            heuristics=lambda *_, **__: _jit,
            cdiv=lambda number, by: -(-number // by),
            next_power_of_2=lambda number: 1 << max(0, number - 1).bit_length(),
        )


class _StandIn(ModuleType):
    """Has every name that is asked for, except those of Python's own protocols."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Constant if name == "constexpr" else _Nothing()


class _Nothing:
    """Answers whatever is done with it by itself: a type, a function or a constant of Triton's."""

    def __getattr__(self, name: str) -> "_Nothing":
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *_: object, **__: object) -> "_Nothing":
        return self


class _Constant:
    """Stands for `triton.language.constexpr`, whose value Python code may read."""

    def __init__(self, value: Any) -> None:
        self.value = value


class _Kernel:
    """Does nothing, however it is launched."""

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return lambda *_, **__: None


def _jit(function: Callable[..., object] | None = None, **_: object) -> Any:
    return _Kernel() if function is not None else _jit
