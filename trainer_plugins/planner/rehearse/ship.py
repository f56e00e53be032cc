"""Send a Trainer to another process without the bytes of its tensors: shapes, dtypes, and who shares a storage."""

import io
import pickle
from typing import Any

import torch

from trainer_plugins.planner.rehearse.by_value import ByValue

# What the other process makes anew, or never needs. Everything else of the user's Trainer comes
# along, so that a subclass finds what its own constructor has left there.
_LEFT_HERE = frozenset(
    {
        *(
            "accelerator",
            "callback_handler",
            "control",
            "state",
            "_memory_tracker",
            "deepspeed",
            "model_wrapped",
        ),
        *(
            "train_dataset",
            "eval_dataset",
            "model_init",
            "hp_search_backend",
            "data_collator",
            "compute_metrics",
        ),
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
    others = {
        name: value
        for name, value in vars(trainer).items()
        if name not in _LEFT_HERE | set(essential)
    }
    left_out = tuple(
        name for name, value in others.items() if not _can_be_sent(value, ByValue(_can_be_sent))
    )
    sent = {name: value for name, value in others.items() if name not in left_out}
    return dumps({**essential, "others": sent}), left_out


def dumps(value: Any) -> bytes:
    """Pickle, with shapes in place of tensors.

    Raises:
        pickle.PicklingError: something in it cannot be pickled; other errors are told as this one.
    """
    by_value = ByValue(_can_be_sent)
    try:
        return _dumps(value, by_value)
    except (pickle.PicklingError, TypeError, AttributeError, ValueError) as error:
        of = (
            f" (the last class of the script that was sent is {by_value.last_class})"
            if by_value.last_class
            else ""
        )
        raise pickle.PicklingError(f"{error}{of}") from error


def _dumps(value: Any, by_value: ByValue) -> bytes:
    file = io.BytesIO()
    _Pickler(file, by_value).dump(value)
    return file.getvalue()


def _can_be_sent(value: Any, by_value: ByValue) -> bool:
    try:
        _dumps(value, by_value)
    except (pickle.PicklingError, TypeError, AttributeError, ValueError, RuntimeError):
        return False
    return True


def loads(content: bytes) -> Any:
    """Read it in a process where tensors are fake: each is made on the host."""
    _storages.clear()
    try:
        return pickle.loads(content)
    finally:
        _storages.clear()


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, by_value: ByValue) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._by_value = by_value
        self._without_bytes: list[torch.Tensor] = []

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.nn.Parameter):
            extra = {
                name: each
                for name, each in vars(value).items()
                if isinstance(each, (bool, int, float, str))
            }
            if hasattr(
                value, "ds_shape"
            ):  # DeepSpeed has this rank's part of it elsewhere; the rehearsal divides anew
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
        return self._by_value.reduce(value)

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


# Of the unpickling that is going on: the storages that several tensors share.
_storages: dict[tuple[int, int], torch.Tensor] = {}


def _tensor(shape_of: tuple[Any, ...], requires_grad: bool) -> torch.Tensor:
    shape, stride, offset, dtype, shared = shape_of
    if shared not in _storages:
        _storages[shared] = torch.empty(shared[1], dtype=torch.uint8)
    made = _storages[shared].view(dtype).as_strided(shape, stride, offset).detach()
    return made.requires_grad_() if requires_grad else made


def _parameter(
    shape_of: tuple[Any, ...], requires_grad: bool, extra: dict[str, Any]
) -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(_tensor(shape_of, False), requires_grad)
    vars(parameter).update(extra)
    return parameter
