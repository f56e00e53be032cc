"""Coupled losses: corrections that make the losses of parts add up, using the whole micro-batch."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from accelerate.utils import recursively_apply
from torch import nn

from trainer_plugins.patched import Patches
from trainer_plugins.survival.attempt.generators import Generators
from trainer_plugins.survival.exact.finality import frozen
from trainer_plugins.survival.exact.shares import IGNORED, IndivisibleError, Inputs
from trainer_plugins.wrapped import tensors_in

ROW = "survival_row"  # name of the row numbers among the inputs of a coupled loss

Compute = Callable[[Inputs], torch.Tensor]


class Divided(NamedTuple):
    """Inputs, and the parts of them to compute next."""

    inputs: Inputs
    parts: tuple[Inputs, ...]


@dataclass(frozen=True)
class TwoMeans:
    """A loss that adds a mean over tokens to a mean over rows, such as ORPO's."""

    # We scale the mean over tokens by the part's tokens per row, divided by the whole's. The whole
    # loss is then a mean over rows, and so is the metric that trainers log for it.

    num_tokens: Callable[[Inputs], torch.Tensor]
    num_rows: Callable[[Inputs], int]
    # Scales the mean over tokens while a loss is computed.
    scale: Callable[[float], AbstractContextManager[object]]

    def loss(self, compute: Compute, part: Inputs, whole: Divided) -> torch.Tensor:
        """Compute the loss of a part; `compute` returns the loss of inputs on their own."""
        of_whole = self._count_per_row(whole.inputs)
        with self.scale(self._count_per_row(part) / of_whole if of_whole else 1.0):
            return compute(part)

    def _count_per_row(self, inputs: Inputs) -> float:
        return float(self.num_tokens(inputs)) / self.num_rows(inputs)


def cpo(trainer: Any) -> TwoMeans:
    """Describe CPO's loss, whose mean covers the tokens of chosen answers."""
    first = 0 if trainer.is_encoder_decoder else 1
    return TwoMeans(
        lambda inputs: (inputs["chosen_labels"][:, first:] != IGNORED).sum(),
        lambda inputs: len(inputs["chosen_labels"]),
        partial(_scale_output, trainer),
    )


def orpo(trainer: Any) -> TwoMeans:
    """Describe ORPO's loss, whose mean also covers the tokens of the prompt."""
    loss, mask = cpo(trainer), "chosen_attention_mask"
    if trainer.is_encoder_decoder:
        return loss
    return replace(loss, num_tokens=lambda inputs: (inputs[mask][:, 1:] == 1).sum())


def dpo_with_sft(trainer: Any) -> TwoMeans:
    """Describe DPO's loss if it includes "sft": a mean over the tokens of chosen answers."""

    def scale(factor: float) -> Patches:
        patches = Patches()
        weights = zip(trainer.loss_types, trainer.loss_weights, strict=True)
        scaled = [weight * factor if kind == "sft" else weight for kind, weight in weights]
        patches.set(trainer, "loss_weights", scaled)
        return patches

    return TwoMeans(
        lambda inputs: inputs["completion_mask"].chunk(2)[0][:, 1:].sum(),
        lambda inputs: len(inputs["completion_mask"]) // 2,
        scale,
    )


_TERM = 4  # index of the mean over tokens in the result of ORPO's and CPO's `concatenated_forward`


def _scale_output(trainer: Any, factor: float) -> Patches:
    patches, forward = Patches(), trainer.concatenated_forward

    def call_scaled(*args: Any, **options: Any) -> Any:
        changed = [*forward(*args, **options)]
        mean = changed[_TERM]  # of no token it is 0 / 0
        changed[_TERM] = mean * factor if factor else torch.zeros_like(mean)
        return changed

    patches.set(trainer, "concatenated_forward", call_scaled)
    return patches


_Rows = tuple[int, ...]  # positions in the whole
_Passed = Callable[[Any, _Rows], Any]  # a module's outputs: kept, plus these rows


@dataclass(slots=True)
class _SeamCall:
    outputs: Any = None  # of all rows, without a graph
    before: dict[_Rows, Generators] = field(default_factory=dict)  # the moment each piece passed
    after: Generators | None = None


class Seam:
    """Passes rows through modules in pieces while the loss behind them sees all of them.

    This is for losses that compare rows, such as contrastive ones and KTO's baseline. First all
    rows pass through the modules without gradients, piece by piece, and we keep the outputs. Then
    each piece passes again with gradients and the same random numbers; the loss is computed on its
    outputs and the kept outputs of all others. By the chain rule the gradient is a sum over rows,
    so the pieces add up. Caching losses (GradCache) do the same.
    """

    def __init__(self, trainer: Any, modules: Iterable[nn.Module]) -> None:
        self._trainer, self._modules = trainer, list(modules)
        self._whole: Inputs | None = None
        self._calls: list[_SeamCall] = []  # of one computation of the loss, in order
        self._passed: set[_Rows] = set()  # pieces that have passed in all of them
        self._next, self._is_inside = 0, False

    def prepare(self, compute: Compute, whole: Divided) -> None:
        """Pass the missing rows of these parts through the modules, without gradients."""
        if self._whole is not whole.inputs or not self._passed:
            self.forget()
            self._whole = whole.inputs
        places = [_places(part, whole.inputs) for part in whole.parts]
        missing = [rows for rows in places if rows not in self._passed]
        if missing:
            with torch.no_grad(), self._passing(partial(self._first, missing)):
                compute(whole.inputs)
            self._passed |= {*missing}

    def loss(self, compute: Compute, part: Inputs, whole: Divided) -> torch.Tensor:
        rows = _places(part, whole.inputs)
        if self._whole is not whole.inputs or rows not in self._passed:
            self.prepare(compute, whole)
        # Code behind the seam gets the gradient of all rows, in the first piece only.
        inside = {p for module in self._modules for p in module.parameters()}
        behind = (p for p in self._trainer.model.parameters() if rows[0] != 0 and p not in inside)
        with frozen(behind), self._passing(partial(self._again, rows)):
            loss = compute(whole.inputs)
        # Each piece computes the whole loss; its gradient is that of its rows alone.
        return loss - (1 - len(rows) / len(whole.inputs[ROW])) * loss.detach()

    def forget(self) -> None:
        """Release everything kept for a micro-batch."""
        self._whole, self._calls, self._passed = None, [], set()

    @contextmanager
    def _passing(self, instead: Callable[..., Any]) -> Iterator[None]:
        self._next, self._is_inside = 0, False
        with Patches() as patches:
            for module in self._modules:
                call = partial(self._call, instead, module.forward)
                patches.set(module, "forward", call)
            yield

    def _call(
        self, instead: Callable[..., Any], forward: Callable[..., Any], *args: Any, **options: Any
    ) -> Any:
        if self._is_inside:  # one of them may call another
            return forward(*args, **options)
        self._is_inside = True
        try:
            number, self._next = self._next, self._next + 1
            return instead(number, partial(self._pass_by, forward, args, options))
        finally:
            self._is_inside = False

    def _first(self, missing: list[_Rows], number: int, passed: _Passed) -> Any:
        if number == len(self._calls):
            self._calls.append(_SeamCall())
        call = self._calls[number]
        again = call.after
        if again is not None:  # a piece was divided, and its parts draw other numbers
            again.restore()
        for rows in missing:
            call.before[rows] = Generators(self._trainer.args.device)
            call.outputs = passed(call.outputs, rows)
        call.after = again or Generators(self._trainer.args.device)
        call.after.restore()
        return _copy(call.outputs)

    def _again(self, rows: _Rows, number: int, passed: _Passed) -> Any:
        call = self._calls[number]
        outputs = _copy(call.outputs)
        if torch.is_grad_enabled():
            call.before[rows].restore()
            outputs = passed(call.outputs, rows)
        assert call.after is not None
        call.after.restore()
        return outputs

    def _pass_by(
        self,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        options: dict[str, Any],
        kept: Any,
        rows: _Rows,
    ) -> Any:
        assert self._whole is not None
        num = len(self._whole[ROW])
        num_each = _num_each((args, options), num)
        places = tuple(row + column * num for column in range(num_each) for row in rows)
        outputs = forward(*_take(args, places, num), **_take(options, places, num))
        return _join(kept, outputs, places, num * num_each)


Coupling = TwoMeans | Seam  # makes the losses of parts add up to that of the whole


def _places(part: Inputs, whole: Inputs) -> _Rows:
    """Return the positions of a part's rows in the whole, which may be rows of another batch."""
    rows = {*part[ROW]}
    return tuple(place for place, row in enumerate(whole[ROW]) if row in rows)


def _num_each(value: Any, num: int) -> int:
    """Return a module's rows per example: sentence-transformers joins columns."""
    return max([1, *(len(t) // num for t in tensors_in(value) if t.dim() and len(t) % num == 0)])


def _take(value: Any, rows: _Rows, num: int) -> Any:
    """Take these rows from a module's arguments, which have a multiple of `num` rows."""

    def take(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.dim() or (len(tensor) == 1 and num > 1):
            return tensor  # shared by all rows
        if len(tensor) <= max(rows) or len(tensor) % num:
            raise IndivisibleError(
                f"a module gets a tensor of {len(tensor)} rows where its micro-batch has {num}"
            )
        return tensor[list(rows)]

    return recursively_apply(take, value)


def _copy(outputs: Any) -> Any:
    """Copy the containers of tensors: CLIP replaces one of its tensors by a projection."""
    return recursively_apply(lambda tensor: tensor, outputs)


def _join(kept: Any, value: Any, rows: _Rows, num: int) -> Any:
    """Merge a module's outputs for some rows into the kept outputs of all, as a copy."""
    if torch.is_tensor(value):
        if not value.dim() or len(value) != len(rows):
            return None  # for example a loss of its own, which is not used
        if kept is None:
            kept = value.new_zeros((num, *value.shape[1:]))
        places = torch.tensor(rows, device=value.device)
        return kept.index_put((places,), value)
    if isinstance(value, Mapping):
        there = kept if kept is not None else {}
        joined = {n: _join(there.get(n), each, rows, num) for n, each in value.items()}
        return type(value)(**joined)
    if isinstance(value, tuple):
        before = kept if kept is not None else (None,) * len(value)
        return tuple(_join(k, v, rows, num) for k, v in zip(before, value, strict=True))
    return value if value is None or isinstance(value, bool | int | float | str) else None
