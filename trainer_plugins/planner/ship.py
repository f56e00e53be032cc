"""Send a Trainer to another process without the bytes of its tensors: shapes, dtypes, and who shares a storage."""

import contextlib
import importlib
import importlib.util
import io
import marshal
import pickle
import sys
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

import torch

# What the other process makes anew, or never needs. Everything else of the user's Trainer comes along, so that a
# subclass finds what its own constructor has left there.
_LEFT_HERE = frozenset(
    {
        *("accelerator", "callback_handler", "control", "state", "_memory_tracker", "deepspeed", "model_wrapped"),
        *("train_dataset", "eval_dataset", "model_init", "hp_search_backend", "data_collator", "compute_metrics"),
        *("lr_scheduler", "_created_lr_scheduler", "get_train_dataloader", "get_eval_dataloader"),
    }
)


def dumps_trainer(trainer: Any) -> tuple[bytes, tuple[str, ...]]:
    """Pickle what a rehearsal needs of a Trainer; the names of what could not be are returned too.

    Raises:
        pickle.PicklingError: its class, its model or its arguments cannot be pickled.
    """
    essential = {
        "class": type(trainer),
        "args": trainer.args,
        "model": trainer.model,
        "optimizer": getattr(trainer.optimizer, "optimizer", trainer.optimizer),
        "has_metrics": trainer.compute_metrics is not None,
    }
    others = {name: value for name, value in vars(trainer).items() if name not in _LEFT_HERE | set(essential)}
    left_out = tuple(name for name, value in others.items() if not _can_be_sent(value))
    sent = {name: value for name, value in others.items() if name not in left_out}
    return dumps({**essential, "others": sent}), left_out


def _can_be_sent(value: Any) -> bool:
    try:
        dumps(value)
    except (pickle.PicklingError, RuntimeError, ValueError):
        return False
    return True


def dumps(value: Any) -> bytes:
    """Pickle, with shapes in place of tensors.

    Raises:
        pickle.PicklingError: something in it cannot be pickled; other errors are told as this one.
    """
    file = io.BytesIO()
    try:
        _Pickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    except (TypeError, AttributeError, ValueError) as error:
        raise pickle.PicklingError(str(error)) from error
    return file.getvalue()


def loads(content: bytes, main_file: str | None = None) -> Any:
    """Read it in a process where tensors are fake: each is made on the host.

    Args:
        content: what `dumps` made.
        main_file: the script whose classes `__main__` stands for; it is run as multiprocessing does, under the name
            `__mp_main__`, and only if such a class is asked for.
    """
    return _Unpickler(io.BytesIO(content), main_file).load()


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, protocol: int) -> None:
        super().__init__(file, protocol)
        self._without_bytes: list[torch.Tensor] = []

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.nn.Parameter):
            extra = {name: each for name, each in vars(value).items() if isinstance(each, (bool, int, float, str))}
            if hasattr(value, "ds_shape"):  # DeepSpeed has this rank's part of it elsewhere; the rehearsal divides anew
                whole = torch.empty(value.ds_shape, dtype=value.dtype, device="meta")
                plain = {name: each for name, each in extra.items() if not name.startswith("ds_")}
                return _parameter, (self._shape_of(whole), value.requires_grad, plain)
            return _parameter, (self._shape_of(value), value.requires_grad, extra)
        if isinstance(value, torch.Tensor):
            return _tensor, (self._shape_of(value), value.requires_grad)
        if isinstance(value, torch.device):
            return torch.device, ("cpu",)
        if isinstance(value, torch.Generator):
            return torch.Generator, ()
        if isinstance(value, torch.nn.Module) and "_original_forward" in vars(value):
            return _without_what_accelerate_did(value)
        if isinstance(value, MethodType):  # by its name pickle would find the method of the class in a replaced one
            return _method, (value.__func__, value.__self__)
        if isinstance(value, FunctionType) and not _has_a_name(value):
            return _of_a_function(value)
        return NotImplemented

    def _shape_of(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        storage = tensor.untyped_storage()
        if storage.data_ptr() == 0:
            self._without_bytes.append(tensor)  # its id is its own as long as it is here
        shared = (storage.data_ptr() or id(tensor), storage.nbytes())
        return (tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype, shared)


def _without_what_accelerate_did(module: torch.nn.Module) -> tuple[Any, ...]:
    """A model prepared by accelerate refuses to be pickled with autocast around its `forward`."""
    made: Any = module.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    state = dict(made[2])
    state["forward"] = state.pop("_original_forward")
    return (made[0], made[1], state, *made[3:])


def _method(function: Any, owner: Any) -> Any:
    return MethodType(function, owner)


def _has_a_name(function: FunctionType) -> bool:
    """Whether pickle finds it by its name, and not another one or nothing."""
    found: Any = sys.modules.get(function.__module__)
    for part in function.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is function


def _of_a_function(function: FunctionType) -> tuple[Any, ...]:
    """A function inside of another one, as libraries put in place of a `forward`: its code and what it closes over.

    The other process has the same Python and the same libraries, and runs the same script.
    """
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    made = (marshal.dumps(function.__code__), function.__globals__["__name__"], len(cells))
    told = {name: getattr(function, name) for name in ("__name__", "__qualname__", "__defaults__", "__kwdefaults__")}
    return _function, made, (cells, told), None, None, _complete


def _function(code: bytes, module: str, num_cells: int) -> FunctionType:
    loaded: CodeType = marshal.loads(code)
    if module == "__main__":
        _load_main(_main_files[-1])
        module = "__mp_main__"
    home = importlib.import_module(module)
    return FunctionType(loaded, vars(home), closure=tuple(CellType() for _ in range(num_cells)))


def _complete(function: FunctionType, state: tuple[list[Any], dict[str, Any]]) -> None:
    cells, told = state
    for cell, content in zip(function.__closure__ or (), cells, strict=True):
        cell.cell_contents = content
    for name, value in told.items():
        setattr(function, name, value)


# Of the unpickling that is going on: the storages that several tensors share, and the script.
_storages: dict[tuple[int, int], torch.Tensor] = {}
_main_files: list[str | None] = []


def _tensor(shape_of: tuple[Any, ...], requires_grad: bool) -> torch.Tensor:
    shape, stride, offset, dtype, shared = shape_of
    if shared not in _storages:
        _storages[shared] = torch.empty(shared[1], dtype=torch.uint8)
    made = _storages[shared].view(dtype).as_strided(shape, stride, offset).detach()
    return made.requires_grad_() if requires_grad else made


def _parameter(shape_of: tuple[Any, ...], requires_grad: bool, extra: dict[str, Any]) -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(_tensor(shape_of, False), requires_grad)
    vars(parameter).update(extra)
    return parameter


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, main_file: str | None) -> None:
        super().__init__(file)
        self._main_file = main_file

    def load(self) -> Any:
        _storages.clear()
        _main_files.append(self._main_file)
        try:
            return super().load()
        finally:
            _storages.clear()
            _main_files.pop()

    def find_class(self, module: str, name: str) -> Any:
        if module == "__main__" and self._main_file is not None:
            _load_main(self._main_file)
            module = "__mp_main__"
        return super().find_class(module, name)


def _load_main(path: str | None) -> None:
    if "__mp_main__" in sys.modules:
        return
    spec = importlib.util.spec_from_file_location("__mp_main__", path) if path is not None else None
    if spec is None or spec.loader is None:
        raise pickle.UnpicklingError(f"{path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules["__mp_main__"] = module
    with contextlib.redirect_stdout(sys.stderr):
        spec.loader.exec_module(module)
