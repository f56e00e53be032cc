"""Evaluation: computes, or generates, a batch that does not fit in parts."""

import math
from collections import deque
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from transformers import Seq2SeqTrainer

from trainer_plugins.advice import SMALLER_EVAL_BATCH, Door
from trainer_plugins.hf_trainer import HfTrainer
from trainer_plugins.survival.attempt.attempt import DidNotFit, attempt
from trainer_plugins.survival.attempt.holders import Roots
from trainer_plugins.survival.attempt.roots import find_loss_roots, roots_of_state
from trainer_plugins.survival.attempt.state import RestorePoint, State
from trainer_plugins.survival.attempt.users_code import is_users_function
from trainer_plugins.survival.certificate.certificate import Certificate, batch_kind
from trainer_plugins.survival.exact.gathers import Exchanging, Gathers
from trainer_plugins.survival.exact.layouts import Layout, find_layout
from trainer_plugins.survival.exact.losses import Family, NoFamily
from trainer_plugins.survival.exact.shares import Batch, IndivisibleError, Inputs, NumItems, Weight
from trainer_plugins.survival.limit.limit import cells, lower, sizes
from trainer_plugins.survival.memo import memo_of
from trainer_plugins.survival.ranks import kind_of
from trainer_plugins.survival.ranks.alone import Ranks
from trainer_plugins.survival.training_run import Attached
from trainer_plugins.survival.words import part_raised, report_in_parts

R = TypeVar("R")

_ONLY_TRAINING = "evaluation batches are not divided with this loss"

# Outputs that the Trainer drops; transformers 5.24 renamed the second to the first.
_CACHES = ("cache", "past_key_values")


def explain_whole(trainer: HfTrainer, family: Family | NoFamily) -> str:
    """Return why evaluation batches of this Trainer are never divided; empty if they may be."""
    if isinstance(family, NoFamily):
        return family.why
    if kind_of(trainer).forward_is_shared:
        return "its ranks compute each forward pass together"
    if family.coupling is not None:
        return _ONLY_TRAINING
    if not type(trainer).prediction_step.__module__.startswith("transformers."):
        return f"{type(trainer).__name__} has a prediction_step of its own"
    return ""


class Part(NamedTuple):
    """Some examples of a batch."""

    inputs: Batch
    num: int
    is_last: bool


class Parts:
    """Divides batches of one kind of work by its limit, in cells (`limit.py`)."""

    def __init__(self) -> None:
        self.limit = math.inf

    def compute(
        self,
        inputs: Inputs,
        whole: Callable[[], R],
        in_parts: Callable[[list[DidNotFit]], R],
        before: RestorePoint,
    ) -> R:
        """Compute a batch whole, or else by `in_parts`, which receives the failures so far."""
        if cells(inputs) > self.limit:
            try:
                return in_parts([])
            except IndivisibleError:
                before.restore()  # the limit was learned on other batches: try this one whole
        result = attempt(whole)
        if not isinstance(result, DidNotFit):
            return result
        before.restore()
        try:
            return in_parts([result])
        except IndivisibleError as error:
            raise result.make_error(str(error)) from None

    def note_failure(self, num: int, num_cells: int) -> None:
        limit = lower(num, num_cells, self.limit, 1)
        if limit is None:
            raise IndivisibleError("there is nothing smaller to try than one example")
        self.limit = limit

    def each(
        self,
        layout: Layout,
        inputs: Inputs,
        failures: list[DidNotFit],
        mark_start: Callable[[], RestorePoint],
        work: Callable[[Part], R],
    ) -> Iterator[tuple[Part, R]]:
        """Compute part after part; after a failure, undo that part and shrink the parts."""
        spans = deque(self._spans(0, layout.count(inputs), cells(inputs)))
        while spans:
            start, stop = spans.popleft()
            part = Part(layout.take(inputs, start, stop), stop - start, is_last=not spans)
            before = mark_start()
            try:
                result = attempt(partial(work, part))
            except Exception as error:  # such as images that are not spread evenly over rows
                raise IndivisibleError(part_raised(error)) from error
            if isinstance(result, DidNotFit):
                before.restore()
                failures.append(result)
                num_cells = cells(part.inputs)
                self.note_failure(part.num, num_cells)
                spans.extendleft(reversed(self._spans(start, part.num, num_cells)))
            else:
                yield part, result

    def _spans(self, start: int, num: int, num_cells: int) -> list[tuple[int, int]]:
        return [*pairwise(accumulate(sizes(num, num_cells, self.limit, 1), initial=start))]


def say_survived(trainer: HfTrainer, what: str, failures: list[DidNotFit], nums: list[int]) -> None:
    """Log that a batch was finished in parts of these sizes, and add it to the timeline."""
    smaller = SMALLER_EVAL_BATCH.flag(Door.ARGUMENTS, rows=max(nums))
    finding = report_in_parts(
        f"an evaluation batch of {what} did not fit, and was computed in {len(nums)} parts",
        failures,
        "Loss and outputs are those of the whole batch. To avoid the failed attempts, set"
        f" {smaller}.",
    )
    memo_of(trainer).remark(trainer.args, trainer.state.global_step, finding)


# Loss, tokens and labels, as `Seq2SeqTrainer.prediction_step` returns them.
Predicted = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


Outputs = dict[str, Any]  # a model's outputs by name: a `ModelOutput` or a dictionary

Result = torch.Tensor | tuple[torch.Tensor, Outputs]  # the loss, alone or with the outputs
Compute = Callable[[Inputs], Result]


class Evaluation:
    """Finishes the evaluation batches of one Trainer that did not fit, with a separate limit."""

    def __init__(self, attached: Attached) -> None:
        self._attached = attached
        self._parts, self._generated = Parts(), Parts()
        # One for losses divided by the caller's number, as the Trainer's are, and one for others.
        self._certificates: dict[bool, Certificate] = {}
        self._is_over_items = False
        self._are_outputs_wanted = True
        self._gathers = Gathers(attached.trainer, Exchanging())

    def begin_run(self) -> None:
        """Forget all measurements: they belong to another run's model."""
        self._certificates.clear()
        vars(self).pop("_roots", None)

    def prediction_step(
        self, model: nn.Module, inputs: Inputs, prediction_loss_only: bool, *args: Any, **kw: Any
    ) -> object:
        """Replace `trainer.prediction_step`, to learn whether outputs are wanted."""
        args_of_run: Any = self._attached.trainer.args
        step = getattr(self._attached.prediction_step, "__func__", None)
        is_own = is_users_function(self._attached.prediction_step)  # it may need them anyway
        self._are_outputs_wanted = is_own or not prediction_loss_only
        generates = (
            not (prediction_loss_only or self._attached.kind.forward_is_shared)
            and step is Seq2SeqTrainer.prediction_step
            and args_of_run.predict_with_generate
        )
        try:
            if generates:
                return self._generate(model, inputs, *args, **kw)
            return self._attached.prediction_step(model, inputs, prediction_loss_only, *args, **kw)
        finally:
            self._are_outputs_wanted = True

    def _generate(self, model: nn.Module, inputs: Inputs, *args: Any, **kw: Any) -> Predicted:
        """Generate from a batch; if it does not fit, in parts, which draw in another order."""
        trainer: Any = self._attached.trainer
        before = self._mark_start()

        def predict(some: Inputs) -> Predicted:
            batch: Any = type(inputs)(some)  # type: ignore[call-arg]
            step: Predicted = self._attached.prediction_step(model, batch, False, *args, **kw)
            return step

        def join(parts: tuple[torch.Tensor | None, ...]) -> torch.Tensor | None:
            values = [part for part in parts if part is not None]
            width = max((value.shape[-1] for value in values), default=0)
            padded = [
                value if value.shape[-1] == width else trainer._pad_tensors_to_max_len(value, width)
                for value in values
            ]
            return torch.cat(padded) if padded else None

        def predict_in_parts(failures: list[DidNotFit]) -> Predicted:
            layout = find_layout(self._attached.family.layouts, inputs)
            num, limited = layout.count(inputs), self._generated
            if failures:
                limited.note_failure(num, cells(inputs))
            parts = limited.each(
                layout, inputs, failures, self._mark_start, lambda part: predict(part.inputs)
            )
            nums, results = zip(*((part.num, result) for part, result in parts), strict=True)
            if failures:
                what = f"{num} {layout.unit} to generate from"
                say_survived(trainer, what, failures, [*nums])
            loss = None
            if "labels" in inputs:
                # The Trainer's own step calls `compute_loss`, which divides the batch.
                loss = trainer.prediction_step(model, inputs, True)[0]
            _, tokens, labels = zip(*results, strict=True)
            return loss, join(tokens), join(labels)

        return self._generated.compute(inputs, partial(predict, inputs), predict_in_parts, before)

    def compute_loss(
        self, model: nn.Module, inputs: Inputs, return_outputs: bool, num_items: NumItems
    ) -> Result:
        options = {"return_outputs": return_outputs, "num_items_in_batch": num_items}

        def compute(some: Inputs) -> Result:
            with self._gathers.hold():  # trainers take labels out of their inputs
                batch = self._attached.batch_type(some)
                result: Result = self._attached.compute_loss(model, batch, **options)
            return result

        self._gathers.begin()
        self._is_over_items = num_items is not None
        whole, in_parts = partial(compute, inputs), partial(self._compute_in_parts, compute, inputs)
        return self._parts.compute(inputs, whole, in_parts, self._mark_start())

    def _compute_in_parts(
        self, compute: Compute, inputs: Inputs, failures: list[DidNotFit]
    ) -> Result:
        family = self._attached.family
        if family.coupling is not None:
            raise IndivisibleError(_ONLY_TRAINING)
        layout = find_layout(family.layouts, inputs)
        num, before = layout.count(inputs), self._mark_start()
        if failures:
            self._parts.note_failure(num, cells(inputs))
        elif num == 1:
            raise IndivisibleError("it holds only one example")
        weight = self._weight(layout, inputs, compute, before)
        factor_of, share_of = weight.shares_of(inputs, num), family.share.shares_of(inputs, num)

        def work(part: Part) -> tuple[torch.Tensor, Outputs | None]:
            with self._gathers.piece(share_of(part.inputs, part.num), part.is_last):
                result = compute(part.inputs)
            self._attached.check_loss_of_part()
            if not isinstance(result, tuple):
                return result, None
            return result[0], self._select_kept(result[1])

        results, nums = [], []
        parts = self._parts.each(layout, inputs, failures, self._mark_start, work)
        for part, (loss, outputs) in parts:
            results.append((loss, outputs, factor_of(part.inputs, part.num)))
            nums.append(part.num)
            if not part.is_last:
                before.begin_next()  # the metrics of the last part are those of the whole
        if failures:
            what = f"{num} {layout.unit} ({cells(inputs)} cells)"
            say_survived(self._attached.trainer, what, failures, nums)
        return _join(layout, results)

    def _mark_start(self) -> RestorePoint:
        state, loss = map(State, self._roots)
        return RestorePoint(self._attached.trainer, "eval", state, loss=loss)

    @cached_property
    def _roots(self) -> tuple[Roots, Roots]:
        """Return the places that the model, and those that a user's loss, may change."""
        trainer = self._attached.trainer
        return roots_of_state(trainer.model), find_loss_roots(trainer)

    def _select_kept(self, outputs: object) -> Outputs:
        """Return the outputs that the Trainer keeps: no caches, and none for a mere loss."""
        if not isinstance(outputs, dict):
            raise IndivisibleError(
                f"its model returns a {type(outputs).__name__} without names for its outputs"
            )
        if not self._are_outputs_wanted:
            return type(outputs)()
        config = self._attached.trainer.model.config
        dropped = {"loss", *getattr(config, "keys_to_ignore_at_inference", _CACHES)}
        return type(outputs)(**{n: v for n, v in outputs.items() if n not in dropped})

    def _weight(
        self, layout: Layout, inputs: Inputs, compute: Compute, before: RestorePoint
    ) -> Weight:
        certificate = self._certificates.get(self._is_over_items)
        if certificate is None:
            alone = Ranks(self._attached.trainer, self._attached.trainer.model)
            family, (roots, _) = self._attached.family, self._roots
            certificate = Certificate(alone, self._gathers, family, roots, is_trained=False)
            self._certificates[self._is_over_items] = certificate
        if certificate.wants(kind := batch_kind(layout, inputs), inputs):

            def loss(some: Inputs, _: object) -> torch.Tensor:
                result = compute(some)
                self._attached.check_loss_of_part()
                value: torch.Tensor = result[0] if isinstance(result, tuple) else result
                return value

            num_fit = max(sizes(layout.count(inputs), cells(inputs), self._parts.limit, 1))
            try:
                certificate.measure(layout, inputs, num_fit, loss, before.put_back)
                certificate.look_at_neighbours(
                    layout, inputs, loss, before.put_back, is_thorough=True
                )
            finally:
                before.restore()
        return certificate.weight(layout, kind)


def _join(layout: Layout, results: list[tuple[torch.Tensor, Outputs | None, float]]) -> Result:
    # Skip parts with no weight: a mean over no token is not a number.
    loss: Any = sum(loss * factor for loss, _, factor in results if factor)
    outputs = [one for _, one, _ in results if one is not None]
    if not outputs:
        return torch.as_tensor(loss)
    joined = {name: _join_values(layout, [one[name] for one in outputs]) for name in outputs[0]}
    return loss, type(outputs[0])(loss=loss, **joined)


def _join_values(layout: Layout, values: list[Any]) -> object:
    first = values[0]
    if isinstance(first, list | tuple):
        return type(first)(_join_values(layout, list(parts)) for parts in zip(*values, strict=True))
    if torch.is_tensor(first) and first.dim():
        return layout.join(values)
    if first is None:
        return None
    raise IndivisibleError("its model returns a value that is no tensor with one row per example")
