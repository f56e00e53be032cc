"""Gives small tensors values on the dry card, although no kernel runs. Imports torch.

The card's memory is host memory, so the CPU's operator computes small tensors on an alias of it:
integers and booleans (tokens, masks, positions, counts, lengths) and a few numbers. The card's own
operator runs too, for its allocations. Large tensors keep their memory's content, which is zero.
For experts or tokens chosen from zeros, see `_CHOICES`; for shapes that depend on values, see
`shapes.py`.
"""

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch._decomp import decomposition_table
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map

from trainer_plugins.inside.cheap import on_processor
from trainer_plugins.inside.process import has_numbers
from trainer_plugins.patched import Patches

_MOST_FLOAT_BYTES = 4 << 10
_MOST_INTEGER_BYTES = 4 << 20
_MOST_BYTES = {torch.int64: 64 << 20, torch.bool: 64 << 20}
"""Indices and masks may be larger: weights never have these types."""
_aten = torch.ops.aten
_empty, _arange = torch.empty, torch.arange  # before DeepSpeed's zero.Init replaces them
_NO_DISPATCH = torch._C._disabled_torch_dispatch_impl
_COMPUTES = ("CUDA", "CompositeExplicitAutograd")
_EXCHANGES = {"c10d", "_c10d_functional"}
"""Namespaces of operators that NCCL computes."""

_ASKS = {_aten.equal, _aten.allclose}
"""Operators that read their own results on the host."""

_UNSET = {getattr(_aten, name) for name in ("empty", "empty_like", "empty_strided", "new_empty")}
"""Operators whose results a Triton kernel may fill. It does not run, so they are zero."""

_MOVES_STORAGE = {_aten.set_, _aten.resize_, _aten.resize_as_}
"""Operators that change which memory a tensor has; its values stay in place."""

_OURS = str(Path(__file__).parent)

# input_buffer.cpp, accumulate; FunctionsManual.cpp, areAnyTensorSubclassLike.
_IN_PLACE = {
    _aten.add.Tensor: _aten.add_.Tensor,
    _aten.scatter_add.default: _aten.scatter_add_.default,
    _aten.index_put.default: _aten.index_put_.default,
    _aten.index_add.default: _aten.index_add_.default,
    _aten.scatter.src: _aten.scatter_.src,
    _aten.scatter.value: _aten.scatter_.value,
}
"""Operators that autograd runs in place on a card, but not under a dispatch mode."""


class Values(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Computes small tensors; `with Values():`, or `Values().__enter__()` for a whole process.

    If this process has numbers, every operator is computed, so that a small model really trains.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._all = has_numbers()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Run compiled functions as compiled; this mode sees their calls (torch 2.12)."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Avoid a wrapper that imports torch's compiler in every run (torch 2.9 to 2.14)."""
        return False

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if _has_fakes(types):
            return func(*args, **kwargs)  # DTensor uses fakes to find an operator's result
        if _has_wrappers(types):
            return NotImplemented  # DTensor and the like return here with their local tensors
        if not isinstance(func, torch._ops.OpOverload):
            return func(*args, **kwargs)  # an operator of graphs: its body returns here
        if any(isinstance(each, torch.Tensor) and each.is_sparse and each.is_cuda for each in args):
            return func(*args, **kwargs)  # it has no storage of its own
        given = _tensors((args, kwargs))
        is_on_card = any(each.is_cuda for each in given) or _is_made_there(kwargs)
        if not is_on_card and not self._all:
            return on_processor(func, given, args, kwargs)
        if not is_on_card or func.namespace in _EXCHANGES:
            return func(*args, **kwargs)
        if func in _IN_PLACE and _is_autograds_own(args[0]):
            func = _IN_PLACE[func]
        packet: Any = func.overloadpacket
        have_values = all(map(has_values, given))
        made = func(*args, **kwargs)
        if not have_values:
            self._clear(made, given)
            _choose(packet, made, args)
            return made
        if func._schema.is_mutable:
            if packet not in _MOVES_STORAGE:
                self._compute(func, args, kwargs)
            return made
        if packet in _UNSET:
            self._clear(made, given)
            return made
        if packet in _ASKS:
            return self._compute(func, args, kwargs)
        found = _tensors(made)
        homes = {each.untyped_storage().data_ptr() for each in given}
        is_new = not any(each.untyped_storage().data_ptr() in homes for each in found)
        if found and is_new and all(map(has_values, found)):
            computed = _tensors(self._compute(func, args, kwargs))
            if [each.shape for each in computed] != [own.shape for own in found]:
                if self._all:
                    raise RuntimeError(f"dry CUDA: the CPU's {func} makes other shapes")
                self._clear(made, given)
                return made
            for own, its in zip(found, computed, strict=True):
                if own.numel():
                    (alias(own) if own.is_cuda else own).copy_(its)
        return made

    def _compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Compute an operator with the CPU's code; None if it fails (unless all are computed)."""
        args, kwargs = tree_map(_move, args), tree_map(_move, kwargs)
        with _disable_current_modes():
            try:
                return func(*args, **kwargs)
            except NotImplementedError as error:
                if self._all and (parts := decomposition_table.get(func)):
                    return parts(*args, **kwargs)
                if self._all:
                    raise RuntimeError(f"dry CUDA: the CPU has no code for {func}") from error
            except RuntimeError:
                if self._all:
                    raise
        return None

    def _clear(self, made: Any, given: list[torch.Tensor]) -> None:
        """Zero small results that were not computed: their blocks still have old content."""
        small = [own for own in _tensors(made) if own.is_cuda and has_values(own) and own.numel()]
        homes = {each.untyped_storage().data_ptr() for each in given} if small else set()
        for own in small:
            if own.untyped_storage().data_ptr() not in homes:
                alias(own).zero_()


def _is_autograds_own(tensor: object) -> bool:
    """Return whether autograd, without Python, writes to this tensor, which nothing else holds.

    It adds to such a tensor in place, but not under a dispatch mode (TensorSubclassLikeUtils.h,
    isTensorSubclassLike).
    """
    if torch.is_grad_enabled() or not isinstance(tensor, torch.Tensor) or _is_called_by_python():
        return False
    held_here = 2  # references: the tensor, and the Python object of the storage
    storage = tensor.untyped_storage()
    fills_storage = storage.nbytes() == tensor.numel() * tensor.element_size()
    return (
        fills_storage
        and torch._C._current_autograd_node() is not None
        and torch._C._storage_Use_Count(storage._cdata) == held_here
    )


def _is_called_by_python() -> bool:
    """Return whether Python code between autograd and an operation called that operation.

    Frames that surround every dispatch do not count: on a card they are absent.
    """
    frame = sys._getframe(2).f_back  # the caller of __torch_dispatch__
    wrapped = ("_dynamo", "_python_dispatch.py", "_compile.py", "torch/_ops.py", _OURS)
    while frame is not None and any(name in frame.f_code.co_filename for name in wrapped):
        frame = frame.f_back
    # _engine_run_backward: a backward inside a backward
    return frame is not None and frame.f_code.co_name != "_engine_run_backward"


def see_into_operators(values: Values) -> None:
    """Also compute values inside packages' operators that are written in Python.

    While the mode runs an operator, it does not see the calls of the operator's kernel.
    """

    def impl(
        implement: Any, library: Any, op_name: Any, fn: Any, dispatch_key: str = "", **kwargs: Any
    ) -> Any:
        if library.ns == "aten" or dispatch_key not in _COMPUTES or not callable(fn):
            return implement(library, op_name, fn, dispatch_key, **kwargs)

        @functools.wraps(fn)
        def run_seen(*given: Any, **named: Any) -> Any:
            with values:
                return fn(*given, **named)

        return implement(library, op_name, run_seen, dispatch_key, **kwargs)

    Patches().wrap(torch.library.Library, "impl", impl)


def has_values(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has values; without numbers, large ones on the dry card have none.

    Floats are large if their storage is.
    """
    if tensor.is_floating_point() or tensor.is_complex():
        is_small = tensor.untyped_storage().nbytes() <= _MOST_FLOAT_BYTES
    else:
        most = _MOST_BYTES.get(tensor.dtype, _MOST_INTEGER_BYTES)
        is_small = tensor.numel() * tensor.element_size() <= most
    return is_small or not tensor.is_cuda or has_numbers()


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """Return a CPU tensor on the same memory."""
    storage = tensor.untyped_storage()
    if not storage.nbytes():
        return _empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    host = torch._C._construct_storage_from_data_pointer(
        storage.data_ptr(), torch.device("cpu"), storage.nbytes()
    )
    made = _empty(0, dtype=tensor.dtype, device="cpu")
    return made.set_(host, tensor.storage_offset(), tensor.shape, tensor.stride())


def _move(value: Any) -> Any:
    """Return the CPU's equivalent of a card's argument."""
    if isinstance(value, torch.Tensor) and value.is_cuda:
        return alias(value)
    if isinstance(value, torch.Generator) and value.device.type == "cuda":
        return torch.Generator().manual_seed(crc32(bytes(value.get_state().tolist())))
    return torch.device("cpu") if isinstance(value, torch.device) else value


def _choose(packet: Any, made: Any, args: Any) -> None:
    choose = _CHOICES.get(packet)
    if choose is None:
        return
    for own in _tensors(made):
        if own.is_cuda and not own.is_floating_point() and own.numel():
            choose(alias(own), args)


def _choose_in_turn(indices: torch.Tensor, args: Any) -> None:
    """Choose each of n in turn, so that experts get equally many tokens."""
    dim = args[2] if len(args) > 2 else -1
    in_turn = _arange(indices.numel(), device="cpu") % args[0].shape[dim]
    indices.copy_(in_turn.reshape(indices.shape))


def _sort_in_order(indices: torch.Tensor, args: Any) -> None:
    """Assume that the input of a sort is in order."""
    dim = args[-1] if isinstance(args[-1], int) and not isinstance(args[-1], bool) else -1
    size = indices.shape[dim]
    along = [size if at == dim % indices.dim() else 1 for at in range(indices.dim())]
    indices.copy_(_arange(size, device="cpu").reshape(along).expand_as(indices))


_CHOICES = {_aten.topk: _choose_in_turn, _aten.sort: _sort_in_order}
"""Results of choosing from numbers that were not computed."""


@functools.cache
def _has_fakes(types: tuple[type, ...]) -> bool:
    return any(issubclass(kind, FakeTensor) for kind in types)


@functools.cache
def _has_wrappers(types: tuple[Any, ...]) -> bool:
    return any(kind.__torch_dispatch__ is not _NO_DISPATCH for kind in types)


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value] if _has_memory(value) else []
    if isinstance(value, dict):
        value = tuple(value.values())
    if not isinstance(value, (tuple, list)):
        return []
    return [tensor for each in value for tensor in _tensors(each)]


def _has_memory(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is neither a wrapper around others nor fake."""
    try:
        tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return False
    return not isinstance(tensor, FakeTensor)


def _is_made_there(kwargs: dict[str, Any]) -> bool:
    device = kwargs.get("device")
    return device is not None and torch.device(device).type == "cuda"
