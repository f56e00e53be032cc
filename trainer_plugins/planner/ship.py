"""Send a Trainer to another process without the bytes of its tensors: shapes, dtypes, and who shares a storage."""

import contextlib
import importlib.util
import io
import pickle
import sys
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
    except (TypeError, AttributeError) as error:
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
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.nn.Parameter):
            extra = {name: each for name, each in vars(value).items() if isinstance(each, (bool, int, float, str))}
            return _parameter, (self._shape_of(value), value.requires_grad, extra)
        if isinstance(value, torch.Tensor):
            return _tensor, (self._shape_of(value), value.requires_grad)
        if isinstance(value, torch.device):
            return torch.device, ("cpu",)
        if isinstance(value, torch.Generator):
            return torch.Generator, ()
        name = getattr(value, "__qualname__", "")
        if name.endswith("enable_input_require_grads.<locals>.make_inputs_require_grads"):
            return _make_inputs_require_grads_of, ()
        return NotImplemented

    def _shape_of(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        storage = tensor.untyped_storage()
        shared = (storage.data_ptr() or id(tensor), storage.nbytes())
        return (tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype, shared)


def _make_inputs_require_grads(module: Any, inputs: Any, output: Any) -> None:
    """transformers/modeling_utils.py has this function inside of another one, where pickle cannot name it."""
    output.requires_grad_(True)


def _make_inputs_require_grads_of() -> Any:
    return _make_inputs_require_grads


# Of the unpickling that is going on: the storages that several tensors share.
_storages: dict[tuple[int, int], torch.Tensor] = {}


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
        try:
            return super().load()
        finally:
            _storages.clear()

    def find_class(self, module: str, name: str) -> Any:
        if module == "__main__" and self._main_file is not None:
            _load_main(self._main_file)
            module = "__mp_main__"
        return super().find_class(module, name)


def _load_main(path: str) -> None:
    if "__mp_main__" in sys.modules:
        return
    spec = importlib.util.spec_from_file_location("__mp_main__", path)
    if spec is None or spec.loader is None:
        raise pickle.UnpicklingError(f"{path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules["__mp_main__"] = module
    with contextlib.redirect_stdout(sys.stderr):
        spec.loader.exec_module(module)
