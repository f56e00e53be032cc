"""Guards weights that may be absent: others see their shape at once, and the right values."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from trainer_plugins.wrapped import tensors_in

_OF_THE_PARAMETER = re.compile(
    "requires_grad_?|grad|grad_fn|is_leaf|_is_view|_base|_version|register_hook|_backward_hooks"
    "|_post_accumulate_grad_hooks|_has_compatible_shallow_copy_type"
)  # functions of torch that ask about the parameter and read no bytes

_OF_THE_SHAPE = re.compile(
    "shape|size|dim|ndim|numel|nelement|stride|is_contiguous|dtype|is_floating_point|is_complex"
    "|element_size|itemsize|nbytes|device|get_device|is_cuda|is_cpu|is_meta|layout|untyped_storage"
)  # functions of torch that ask about the layout in memory and read no bytes


class Guarded:
    """Answers for a parameter whose bytes may be absent. Mixed into its class while streamed.

    Code outside the layer also gets the right value: the layer comes to the card, and stays while
    that value lives. Writes to the value are kept.
    """

    keeper: Any  # the `Stream` of its model, which imports this file

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        with torch._C.DisableTorchFunctionSubclass():
            return _answer(cls.keeper, func, args, kwargs or {})

    def to(self, *args: Any, **kwargs: Any) -> object:
        """Move or convert the weight. bitsandbytes' own `to` makes a new weight."""
        assert isinstance(self, torch.nn.Parameter)
        if _changes_nothing(self, *args, **kwargs):
            return self
        device, *_ = torch._C._nn._parse_to(*args, **kwargs)
        if hasattr(self, "quant_state") and device is not None and device.type == "cpu":
            self.keeper.leave()  # the scales move in place, so the weight must follow
            return self
        return super().to(*args, **kwargs)  # type: ignore[misc]

    def __deepcopy__(self, memo: dict[int, object]) -> object:
        """Copy the weight with its original class: the copy is not streamed."""
        assert isinstance(self, torch.nn.Parameter)
        guard, weight = type(self), self.keeper.weight_of(self)
        self.keeper.bring([weight])
        self.__class__ = guard.__mro__[2]
        copy_of: Callable[..., object] = type(self).__deepcopy__
        try:
            with torch._C.DisableTorchFunctionSubclass():
                copy: object = copy_of(self, memo)
        finally:
            self.__class__ = guard
        return copy


def make_guarded(kind: type, keeper: Any) -> type:
    """Return a subclass that guards weights. It keeps the name, which libraries check."""
    return type(kind.__name__, (Guarded, kind), {"__module__": kind.__module__, "keeper": keeper})


def _answer(
    keeper: Any, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> object:
    name = getattr(func, "__name__", "")
    is_set = name == "__set__"
    if name in ("__get__", "__set__", "__delete__"):
        name = getattr(getattr(func, "__self__", None), "__name__", "")
    if _OF_THE_PARAMETER.fullmatch(name):
        return func(*args, **kwargs)
    guarded_ones = (one for one in tensors_in((args, kwargs)) if isinstance(one, Guarded))
    weights = {id(one): keeper.weight_of(one) for one in guarded_ones}
    if _OF_THE_SHAPE.fullmatch(name):
        there = tree_map_only(Guarded, lambda one: weights[id(one)].on_card, (args, kwargs))
        return func(*there[0], **there[1])
    if keeper.is_computing:
        keeper.bring(weights.values())
        return func(*args, **kwargs)
    if name == "detach" and keeper.is_saving:
        return keeper.weight_of(args[0]).host.detach()
    if name == "data_ptr":
        return keeper.weight_of(args[0]).host.data_ptr()  # always different for two weights
    if is_set and name == "data":
        _set(keeper, *args)
        return None
    keeper.bring(weights.values())
    theirs = {key: weight.on_card.detach() for key, weight in weights.items()}
    given = tree_map_only(Guarded, lambda one: theirs[id(one)], (args, kwargs))
    result = func(*given[0], **given[1])
    if any(result is one for one in theirs.values()):  # from an in-place function
        result = args[0]
    theirs.clear()  # nothing of ours may hold the storage any longer
    del given
    keeper.lend(weights.values(), is_written=_writes(name, kwargs))
    return result


def _set(keeper: Any, shown: torch.Tensor, value: torch.Tensor) -> None:
    """Write an assignment to `weight.data` through; a weight on the CPU ends the streaming."""
    weight = keeper.weight_of(shown)
    if value is shown:
        return
    is_like_it = value.shape == weight.host.shape and value.dtype == weight.host.dtype
    if value.device.type == "cpu" and is_like_it:
        keeper.leave()
        shown.data = value
        return
    for name in ("shape", "dtype", "device"):
        old, new = getattr(weight.on_card, name), getattr(value, name)
        if old != new:
            raise RuntimeError(
                f"a weight of {name} {old} cannot become {new} while its model is streamed: end"
                " that first, with model.cpu()"
            )
    keeper.bring([weight])
    weight.on_card.data.copy_(value.detach())
    keeper.lend([weight], is_written=True)


def _changes_nothing(shown: torch.Tensor, *args: Any, **kwargs: Any) -> bool:
    if kwargs.pop("copy", False):
        return False
    device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
    here = torch.empty(0, device=device).device if device is not None else shown.device
    return here == shown.device and dtype in (None, shown.dtype)


def _writes(name: str, kwargs: Mapping[str, Any]) -> bool:
    is_in_place = name.endswith("_") and not name.endswith("__")
    is_operator = name.startswith("__i") and name not in ("__int__", "__index__", "__invert__")
    return is_in_place or is_operator or name == "__setitem__" or "out" in kwargs
