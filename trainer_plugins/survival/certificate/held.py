"""Held: makes passes in training mode draw no random numbers, so equal rows give equal results."""

import math
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from trainer_plugins.survival.attempt.generators import pythons_and_numpys

# Stands for a number from [0, 1): with it `keep_probability + rand()`, rounded down, keeps all. Its
# multiples are spread evenly, so half of the signs of `round_differently` are up.
_GOLDEN = 0.6180339887498949

_FAR = 4.0  # farthest normal number at a level, in standard deviations

_MOST_DIGITS = 64  # last digits between the numbers of rows: far below any tolerance

# Times the effect of `round_differently`: a smaller one may be rounding. Right weights reached 2.1.
OF_ROUNDING = 3.0

_Named = dict[str, Any]  # the arguments of an operation, by name


class Drawers(ExitStack):
    """Finds the modules that draw from Python's or numpy's generators, as SpecAugment does."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._open: list[nn.Module] = []
        self._found: list[nn.Module] = []
        self._last = pythons_and_numpys()
        self.in_eval: list[nn.Module] = []  # modules that `to_eval` put into eval mode
        for module in model.modules():
            self.enter_context(module.register_forward_pre_hook(self._enter, prepend=True))
            self.enter_context(module.register_forward_hook(self._leave, always_call=True))

    def begin(self) -> None:
        self._open, self._last = [], pythons_and_numpys()

    def to_eval(self) -> bool:
        """Put the modules found since into eval mode, without their children; False if none."""
        found = [module for module in self._found if module.training]
        for module in found:
            module.training = False
            self.callback(setattr, module, "training", True)
        self.in_eval += found
        return bool(found)

    def _enter(self, module: nn.Module, _: object) -> None:
        self._look()
        self._open.append(module)

    def _leave(self, module: nn.Module, *_: object) -> None:
        self._look()
        if self._open and self._open[-1] is module:
            self._open.pop()

    def _look(self) -> None:
        now = pythons_and_numpys()
        if now != self._last and self._open and self._open[-1] not in self._found:
            self._found.append(self._open[-1])
        self._last = now


class HeldAt(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Makes torch draw the same numbers for each row: near a level of [0, 1), or spread evenly."""

    # Dropout keeps everything, and noise is a fixed point within its bounds. Training mode stays
    # on, in which batch statistics couple rows. We intercept draws in the dispatcher, including the
    # forward passes of checkpointing; `Drawers` finds draws from other generators.

    supports_higher_order_operators = True  # such as flex_attention, which is passed on

    def __init__(self, level: float | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.point = _point if level is None else partial(torch.full_like, fill_value=level)
        self.num_deviations = 1.0 if level is None else _FAR

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[object, ...] = (), kwargs: _Named | None = None
    ) -> object:
        kwargs = kwargs or {}
        schema = getattr(func, "_schema", None)
        if schema is None:
            return func(*args, **kwargs)
        names = (argument.name for argument in schema.arguments)
        named = dict(zip(names, args, strict=False)) | kwargs
        if named.get("dropout_p"):  # fused attention, forward and backward
            return func(**{**named, "dropout_p": 0.0})
        result, fix = func(*args, **kwargs), _FIXES.get(schema.name)
        return result if fix is None else fix(result, named, self)


def _point(like: torch.Tensor) -> torch.Tensor:
    """Return fixed numbers in [0, 1), which differ along the last of three dimensions."""
    # A norm removes a constant. With fewer dimensions the last may be rows or tokens.
    if like.dim() >= 3:
        return _spread(like.size(-1), like).to(like.dtype).expand_as(like)
    point = torch.full_like(like, _GOLDEN)
    if like.dim() and like.dtype in (torch.float32, torch.float64):
        # Each row is a last digit lower, so that sorting drawn numbers moves rows, as in mixup.
        digits = torch.arange(len(like), device=like.device) % _MOST_DIGITS
        point -= torch.finfo(like.dtype).eps * digits.view(-1, *[1] * (like.dim() - 1))
    return point


def _spread(num: int, like: torch.Tensor) -> torch.Tensor:
    places = torch.arange(1, num + 1, device=like.device, dtype=torch.float64)
    return (places * _GOLDEN).frac()


def _pick(named: _Named, *names: str) -> Any:
    return next((named[name] for name in names if named.get(name) is not None), None)


def _uniform(result: torch.Tensor, named: _Named, held: HeldAt) -> torch.Tensor:
    low, high = named.get("from", 0.0), named.get("to", 1.0)
    return result.copy_(low + (high - low) * held.point(result))


def _normal(result: torch.Tensor, named: _Named, held: HeldAt) -> torch.Tensor:
    mean, std = named.get("mean", 0.0), named.get("std", 1.0)
    return result.copy_(mean + held.num_deviations * std * (2 * held.point(result) - 1))


def _exponential(result: torch.Tensor, named: _Named, held: HeldAt) -> torch.Tensor:
    return result.copy_(-torch.log1p(-held.point(result)) / named.get("lambd", 1.0))


def _bernoulli(result: torch.Tensor, named: _Named, held: HeldAt) -> torch.Tensor:
    p = _pick(named, "p")
    if p is None:
        p = named["self"] if result is not named["self"] else 0.5
    if held.num_deviations > 1:
        return result.copy_(held.point(torch.empty_like(result, dtype=torch.float32)) < p)
    return result.copy_(p > 0) if torch.is_tensor(p) else result.fill_(p > 0)


def _dropout(
    result: tuple[torch.Tensor, torch.Tensor], named: _Named, _: HeldAt
) -> tuple[torch.Tensor, torch.Tensor]:
    mask = result[1]
    if not named.get("train", True) or not 0 < named["p"] < 1:
        return result
    # Its backward multiplies by the mask and by this.
    return named["input"] / (1 - named["p"]), mask.fill_(True)


def _integers(result: torch.Tensor, named: _Named, held: HeldAt) -> torch.Tensor:
    low, high = _pick(named, "low", "from") or 0, _pick(named, "high", "to")
    part = float(held.point(torch.empty(())))
    return result.fill_(low if high is None else low + int((high - low) * part))


def _likeliest(result: torch.Tensor, named: _Named, _: HeldAt) -> torch.Tensor:
    most = named["self"].topk(min(named["num_samples"], named["self"].size(-1))).indices
    return result.copy_(most[..., :1].expand_as(result) if named.get("replacement") else most)


_Fix = Callable[[Any, _Named, HeldAt], object]
_BY_FIX: dict[_Fix, tuple[str, ...]] = {
    _uniform: ("rand", "rand_like", "uniform", "uniform_"),
    _normal: ("randn", "randn_like", "normal", "normal_", "normal_functional"),
    _exponential: ("exponential", "exponential_"),
    _bernoulli: ("bernoulli", "bernoulli_"),
    _dropout: ("native_dropout",),
    _integers: ("randint", "randint_like", "random", "random_"),
    # Not in order: otherwise code that mixes each row with a drawn one would mix it with itself.
    lambda result, *_: result.copy_(torch.arange(len(result)).roll(1)): ("randperm",),
    _likeliest: ("multinomial",),
}
_FIXES: dict[str, _Fix] = {f"aten::{name}": fix for fix, names in _BY_FIX.items() for name in names}


def round_differently(model: nn.Module) -> ExitStack:
    """Change each innermost module's output in its last digit: a large effect is rounding."""
    hooks = ExitStack()
    for module in model.modules():
        if next(module.children(), None) is None:
            hooks.enter_context(module.register_forward_hook(_move))
    return hooks


def _move(_: nn.Module, __: object, output: object) -> object:
    if not torch.is_tensor(output) or not output.is_floating_point() or not output.dim():
        return output
    *places, size = output.shape
    moves = signs(math.prod(places), output).reshape(*places, 1) * signs(size, output)
    return output * (1 + torch.finfo(output.dtype).eps * moves)


def signs(num: int, like: torch.Tensor) -> torch.Tensor:
    """Return that many numbers, each 1 or -1, in an order without a pattern."""
    return (1 - 2 * (_spread(num, like) < 0.5)).to(like.dtype)
