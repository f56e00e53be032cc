"""Send a Trainer and its batches to another process: shapes, dtypes, shared storages, no bytes."""

import dataclasses
import functools
import io
import pickle
from copyreg import __newobj__ as newobj  # type: ignore[attr-defined]
from types import FunctionType
from typing import Any

import cloudpickle
import torch
from torch.nn.utils import parametrize

from trainer_plugins.planner.rehearse import rollout
from trainer_plugins.streaming.stream import Stream, stream_of

# Rebuilt there, or never used; a subclass finds everything else that its constructor set.
_LEFT_HERE = {
    "accelerator", "callback_handler", "control", "state", "_memory_tracker", "deepspeed",
    "model_wrapped", "train_dataset", "eval_dataset", "model_init", "hp_search_backend",
    "data_collator", "compute_metrics", "_dist", "vllm_generation", "vllm_client", "async_loop",
    "async_loop_thread", "lr_scheduler", "_created_lr_scheduler", "get_train_dataloader",
    "get_eval_dataloader",
}  # fmt: skip

# the original `forward` of a module that accelerate dispatches or prepares
_FORWARDS = frozenset({"_old_forward", "_original_forward"})

# accelerate's hooks.py, big_modeling.py, accelerator.py
_OF_ACCELERATE = _FORWARDS | {"_hf_hook", "to", "cuda"}

# the errors of values that cannot be pickled
_NOT_SENDABLE = (pickle.PicklingError, TypeError, AttributeError, ValueError, RuntimeError)

_MARKS = {
    id(getattr(dataclasses, name)): name for name in ("MISSING", "KW_ONLY", "_HAS_DEFAULT_FACTORY")
}  # markers that dataclasses compares by identity


def dumps_trainer(trainer: Any) -> tuple[bytes, tuple[str, ...]]:
    """Pickle a Trainer for a rehearsal; name the attributes that cannot be pickled."""
    essential = {
        "class": type(trainer),
        "args": trainer.args,
        "model": trainer.model,
        # without accelerate's wrapper
        "optimizer": getattr(trainer.optimizer, "optimizer", trainer.optimizer),
        "has_metrics": trainer.compute_metrics is not None,
    }
    others = {
        name: value
        for name, value in vars(trainer).items()
        if name not in _LEFT_HERE | set(essential)
    }
    if "reward_funcs" in others:  # the user's functions are not called
        others["reward_funcs"] = rollout.models_of(trainer)
    left_out = tuple(name for name, value in others.items() if not _can_be_sent(value))
    sent = {name: value for name, value in others.items() if name not in left_out}
    return dumps({**essential, "others": sent}, stream_of(trainer.model)), left_out


def dumps(value: object, stream: Stream | None = None) -> bytes:
    """Pickle a value with shapes instead of tensors; weights in `stream` have no bytes here.

    Classes and functions that another process cannot import are sent by content, as cloudpickle
    does. If they refer to something that cannot be pickled, such as a lock or a file, a hole
    replaces it.
    """
    file = io.BytesIO()
    try:
        _Pickler(file, stream).dump(value)
    except _NOT_SENDABLE as error:
        raise pickle.PicklingError(str(error)) from error
    return file.getvalue()


def _can_be_sent(value: object) -> bool:
    pickler = _Pickler(io.BytesIO(), None)
    try:
        pickler.dump(value)
    except _NOT_SENDABLE:
        return False
    return not pickler.has_holes


def loads(content: bytes) -> Any:
    """Unpickle the output of `dumps`; tensors are in main memory, without values."""
    try:
        return pickle.loads(content)
    finally:
        _storages.clear()


class _Hole:
    """Stands for a value that cannot be pickled."""


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc] # it is not typed
    def __init__(self, file: io.BytesIO, stream: Stream | None) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._stream, self.has_holes = stream, False
        self._without_bytes: list[torch.Tensor] = []

    def reducer_override(self, value: object) -> Any:
        if isinstance(value, torch.nn.Parameter):
            extra = {
                name: each
                for name, each in vars(value).items()
                if isinstance(each, (bool, int, float, str)) and not name.startswith("ds_")
            }
            # DeepSpeed keeps this rank's shard elsewhere; the rehearsal shards the parameter again.
            whole: torch.Tensor = value
            if hasattr(value, "ds_shape"):
                whole = torch.empty(value.ds_shape, dtype=value.dtype, device="meta")
            return _parameter, (self._shape_of(whole), value.requires_grad, extra)
        if isinstance(value, torch.Tensor):
            return _tensor, (self._shape_of(value), value.requires_grad)
        if isinstance(value, torch.device):
            return torch.device, ("cpu",)
        if isinstance(value, torch.Generator):
            return torch.Generator, ()
        if isinstance(value, torch.nn.Module) and vars(value).keys() & _FORWARDS:
            return _reduce_module(value)
        if isinstance(value, torch.nn.Module) and parametrize.is_parametrized(value):
            kind = parametrize.type_before_parametrizations(value)
            return newobj, (kind,), vars(value), None, None, _restore_parametrized
        if id(value) in _MARKS:
            return getattr, (dataclasses, _MARKS[id(value)])
        if type(value) is functools.cached_property:  # before Python 3.12 it holds a lock
            return functools.cached_property, (value.func,), {"attrname": value.attrname}
        if isinstance(value, (type, FunctionType)):
            return super().reducer_override(value)
        try:
            reduce = self.dispatch_table.get(type(value))
            return reduce(value) if reduce else value.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        except _NOT_SENDABLE:
            if isinstance(value, torch.nn.Module):
                raise
            self.has_holes = True
            return _Hole, ()

    def _shape_of(self, tensor: torch.Tensor) -> "_ShapeOf":
        if self._stream is not None:
            tensor = self._stream.get_copy(tensor)
        storage = tensor.untyped_storage()
        if storage.data_ptr() == 0:
            self._without_bytes.append(tensor)  # kept alive, so that no other tensor gets its id
        shared = (storage.data_ptr() or id(tensor), storage.nbytes())
        return (tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype, shared)


# shape, stride, offset, dtype; identity and bytes of the storage
_ShapeOf = tuple[tuple[int, ...], tuple[int, ...], int | torch.SymInt, torch.dtype, tuple[int, int]]


def _reduce_module(module: torch.nn.Module) -> tuple[object, ...]:
    """Reduce a module to its original `forward`: accelerate's autocast cannot be pickled."""
    made: Any = module.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    state = {name: value for name, value in made[2].items() if name not in _OF_ACCELERATE}
    found = (made[2].get(name) for name in ("_old_forward", "_original_forward"))
    state["forward"] = next(each for each in found if each is not None)
    return (made[0], made[1], state, *made[3:])


def _restore_parametrized(module: torch.nn.Module, state: dict[str, object]) -> None:
    """Restore the class that `register_parametrization` gave a module, for its properties."""
    vars(module).update(state)
    parametrize._inject_new_class(module)
    for name in module.parametrizations:  # type: ignore[union-attr]
        parametrize._inject_property(module, name)


# The storages of the current unpickling, which tensors may share.
_storages: dict[tuple[int, int], torch.Tensor] = {}


def _tensor(shape_of: _ShapeOf, requires_grad: bool) -> torch.Tensor:
    shape, stride, offset, dtype, shared = shape_of
    if shared not in _storages:
        _storages[shared] = torch.empty(shared[1], dtype=torch.uint8)
    made = _storages[shared].view(dtype).as_strided(shape, stride, offset).detach()
    return made.requires_grad_() if requires_grad else made


def _parameter(
    shape_of: _ShapeOf, requires_grad: bool, extra: dict[str, object]
) -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(_tensor(shape_of, False), requires_grad)
    vars(parameter).update(extra)
    return parameter
