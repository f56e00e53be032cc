"""Let Python around Triton's kernels run without Triton and without a card.

A kernel takes nothing from the allocator itself, so kernels can do nothing: Liger's
(liger_kernel/ops), and TRL's for logits and their losses. Only the autotuner does.
"""

import importlib.abc
import importlib.machinery
import inspect
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch

_NAME = "triton"
_L2_BYTES = 256 << 20  # get_empty_cache_for_benchmark in triton/backends/nvidia/driver.py, 3.7


def kernels_do_nothing() -> None:
    """Let a stand-in be imported instead of Triton, permanently and even where it is installed."""
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
            autotune=_autotune,
            heuristics=lambda *_, **__: lambda kernel: kernel,
            cdiv=lambda number, by: -(-number // by),
            next_power_of_2=lambda number: 1 << max(0, number - 1).bit_length(),
        )


class _StandIn(ModuleType):
    """Has every name that is asked for, except those of Python's own protocols."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "constexpr":
            return _Constant
        # torch asks whether things are instances of its classes
        return type(name, (_Nothing,), {}) if name[0].isupper() else _Nothing()


class _Nothing:
    """Stands for any type, function or constant of Triton; each use of it returns itself."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

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
    """Does nothing when it is launched."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return lambda *_, **__: None


class _Tuned(_Kernel):
    """Is timed before it is first launched with other sizes, which empties the card's L2 cache."""

    def __init__(self, names: Sequence[str], key: Sequence[str]) -> None:
        super().__init__(names)
        self._key, self._timed = key, set[tuple[object, ...]]()

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return self._launch

    def _launch(self, *args: object, **kwargs: object) -> None:
        given = {**dict(zip(self.names, args, strict=False)), **kwargs}
        tensors = [each for each in given.values() if isinstance(each, torch.Tensor)]
        sizes = (*map(given.get, self._key), *(each.dtype for each in tensors))
        if sizes not in self._timed:
            self._timed.add(sizes)
            torch.empty(_L2_BYTES // 4, dtype=torch.int, device="cuda")  # as there


def _jit(function: Callable[..., object] | None = None, **_: object) -> Any:
    return _Kernel([*inspect.signature(function).parameters]) if function is not None else _jit


def _autotune(configs: object, key: Sequence[str] = (), **_: object) -> Callable[..., _Kernel]:
    """Let a kernel be timed if it has several configurations (triton/runtime/autotuner.py)."""
    has_choice = isinstance(configs, list) and len(configs) > 1
    return lambda kernel: _Tuned(kernel.names, key) if has_choice else kernel


class _LogProbabilities(torch.autograd.Function):
    """Allocates what TRL's trl/kernels/logprob_entropy.py does for log-probabilities."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        index: torch.Tensor,
        row_mask: torch.Tensor | None,
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        shape = logits.shape[:-1]
        made = [torch.empty(shape, dtype=torch.float32, device=logits.device) for _ in range(4)]
        ctx.save_for_backward(logits, index, *made[2:], row_mask)
        return made[0], made[1]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        logits: torch.Tensor = ctx.saved_tensors[0]
        gradient = torch.empty_like(logits, memory_format=torch.contiguous_format)
        _read = [each.contiguous() for each in gradients if each is not None]
        return gradient, None, None


def trl_kernels_do_nothing() -> None:
    """Replace TRL's kernels by what they allocate, permanently."""
    kernels: Any = sys.modules.get("trl.kernels.chunked_logprob")
    caller: Any = sys.modules.get("trl.trainer.utils")
    if hasattr(caller, "_supports_trl_loss_kernel"):
        caller.is_triton_available = lambda: True
        caller._fused_logprob_entropy = _log_probabilities
    if kernels is None or not hasattr(caller, "add_fused_lm_head"):
        return
    # they read a tile of the logits, and write statistics, or the gradient over the tile
    kernels._use_triton = lambda device: False  # it then calls the two functions below
    kernels._forward_tile = kernels._backward_tile = lambda *args, **kwargs: None
    # with Triton, only the tokens that count are scored
    caller._use_triton = lambda device: True


def _log_probabilities(
    logits: torch.Tensor,
    index: torch.Tensor,
    temperature: float = 1.0,
    row_mask: torch.Tensor | None = None,
) -> Any:
    return _LogProbabilities.apply(logits, index, row_mask)  # type: ignore[no-untyped-call]
