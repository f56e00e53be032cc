"""Evaluation: a batch that does not fit is computed in parts. No gradients, so there is nothing to take back."""

import math
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from trainer_plugins.finding import Finding, Severity
from trainer_plugins.survival.attempt import DidNotFit, attempt
from trainer_plugins.survival.certificate import certify_values
from trainer_plugins.survival.layouts import IndivisibleError, Inputs, Layout, find_layout
from trainer_plugins.survival.limit import cells, lower, sizes
from trainer_plugins.survival.ranks.gathers import Gathers
from trainer_plugins.survival.run import Attached, memo_of
from trainer_plugins.survival.snapshot import Snapshot
from trainer_plugins.survival.weights import Weight

Compute = Callable[[Inputs], Any]


class Evaluation:
    """Of one Trainer. It has a limit of its own: nothing is kept for a backward pass."""

    def __init__(self, attached: Attached) -> None:
        self._attached = attached
        self._limit = math.inf
        self._weights: dict[tuple[str, bool], Weight] = {}
        """By the layout, and whether losses are divided by a number that the caller gives: the Trainer does."""
        self._is_over_items = False
        self._are_outputs_wanted = True
        self._gathers = Gathers(attached.trainer.accelerator)

    def prediction_step(
        self, model: nn.Module, inputs: Inputs, prediction_loss_only: bool, *args: Any, **kw: Any
    ) -> Any:
        """In the place of `trainer.prediction_step`, to know whether somebody waits for the outputs."""
        self._are_outputs_wanted = not prediction_loss_only
        try:
            return self._attached.prediction_step(model, inputs, prediction_loss_only, *args, **kw)
        finally:
            self._are_outputs_wanted = True

    def compute_loss(self, model: nn.Module, inputs: Inputs, return_outputs: bool, num_items: Any) -> Any:
        """Loss, and outputs where they are asked for, as `trainer.compute_loss` gives them."""
        trainer = self._attached.trainer
        if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:  # whose forward passes reach the other ranks
            return self._attached.compute_loss(
                model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items
            )

        def compute(some: Inputs) -> Any:  # a copy for each attempt: trainers take labels out of theirs
            with self._gathers.held():
                return self._attached.compute_loss(
                    model, dict(some), return_outputs=return_outputs, num_items_in_batch=num_items
                )

        self._gathers.begin()
        self._is_over_items = num_items is not None
        before = Snapshot(trainer, "eval")
        if cells(inputs) > self._limit:
            try:
                return self._in_parts(compute, inputs, [])
            except IndivisibleError:
                before.restore()  # the limit is that of other batches: this one is tried as it is
        result = attempt(partial(compute, inputs))
        if not isinstance(result, DidNotFit):
            return result
        before.restore()
        try:
            return self._in_parts(compute, inputs, [result])
        except IndivisibleError as error:
            raise result.as_error(str(error)) from None

    def _in_parts(self, compute: Compute, inputs: Inputs, failures: list[DidNotFit]) -> Any:
        family, trainer = self._attached.family, self._attached.trainer
        layout = find_layout(family.layouts, inputs)
        num, num_cells = layout.count(inputs), cells(inputs)
        before = Snapshot(trainer, "eval")
        if failures:
            self._lower(num, num_cells)
        elif num == 1:
            raise IndivisibleError("it is one example")
        weight = self._weight(layout, inputs, compute, before)
        whole, whole_share = weight.of(inputs, num), family.share.of(inputs, num)
        spans = deque(_spans(0, sizes(num, num_cells, self._limit, 1)))
        results = []
        while spans:
            start, stop = spans.popleft()
            part = layout.take(inputs, start, stop)
            share = family.share.share(family.share.of(part, stop - start), whole_share)
            result = attempt(partial(self._compute_part, compute, part, share, not spans))
            if isinstance(result, DidNotFit):
                before.restore()
                failures.append(result)
                self._lower(stop - start, cells(part))
                spans.extendleft(reversed(_spans(start, sizes(stop - start, cells(part), self._limit, 1))))
                continue
            results.append((result, weight.share(weight.of(part, stop - start), whole)))
            if spans:
                before.restore_metrics()  # those of the last one are those of the whole
        if failures:
            self._say(failures, f"{num} {layout.unit} ({num_cells} cells)", len(results))
        return _joined(layout, results)

    def _compute_part(self, compute: Compute, part: Inputs, share: float, is_last: bool) -> Any:
        with self._gathers.piece(share, is_last):
            result = compute(part)
        if isinstance(result, tuple):
            loss, outputs = result
            return loss, self._kept(outputs)
        return result

    def _kept(self, outputs: Any) -> Any:
        """What the Trainer keeps of the outputs: neither caches, nor anything where only the loss is wanted."""
        if not isinstance(outputs, dict):
            raise IndivisibleError(f"its model returns a {type(outputs).__name__}, in which nothing has a name")
        dropped = getattr(self._attached.trainer.model.config, "keys_to_ignore_at_inference", ["past_key_values"])
        wanted = {n: v for n, v in outputs.items() if self._are_outputs_wanted and n not in (*dropped, "loss")}
        return type(outputs)(**wanted)

    def _weight(self, layout: Layout, inputs: Inputs, compute: Compute, before: Snapshot) -> Weight:
        key = (layout.name, self._is_over_items)
        if key not in self._weights:

            def loss(some: Inputs) -> torch.Tensor:
                result = compute(some)
                value: torch.Tensor = result[0] if isinstance(result, tuple) else result
                return value

            try:
                with self._gathers.measuring():
                    self._weights[key] = certify_values(
                        self._attached.trainer, self._attached.family, layout, inputs, loss
                    )
            finally:
                before.restore()
        return self._weights[key]

    def _lower(self, num: int, num_cells: int) -> None:
        limit = lower(num, num_cells, self._limit, 1)
        if limit is None:
            raise IndivisibleError("there is nothing smaller to try than one example")
        self._limit = limit

    def _say(self, failures: list[DidNotFit], what: str, num_parts: int) -> None:
        trainer = self._attached.trainer
        seconds = sum(failure.seconds for failure in failures)
        finding = Finding(
            code="out-of-memory-survived",
            severity=Severity.WARNING,
            summary=f"an evaluation batch of {what} did not fit, and was computed in {num_parts} parts",
            evidence=f"failed attempts: {len(failures)}, {seconds:.2f} s; {failures[0].first_line}",
            remedy="Nothing has to be done: loss and outputs are those of the whole. "
            "A smaller per_device_eval_batch_size spares the attempts.",
            amount=float(len(failures)),
        )
        memo_of(trainer).remark(trainer.args, trainer.state.global_step, finding)


def _spans(start: int, nums: list[int]) -> list[tuple[int, int]]:
    spans = []
    for num in nums:
        spans.append((start, start + num))
        start += num
    return spans


def _joined(layout: Layout, results: list[tuple[Any, float]]) -> Any:
    """Of the results of all parts, with their factors, that of the whole."""
    losses = [result[0] if isinstance(result, tuple) else result for result, _ in results]
    # What weighs nothing is left out: a mean over no token is not a number.
    loss = sum(loss * factor for loss, (_, factor) in zip(losses, results, strict=True) if factor)
    if not isinstance(results[0][0], tuple):
        return loss
    outputs = [result[1] for result, _ in results]
    joined = {name: _joined_values(layout, [one[name] for one in outputs]) for name in outputs[0]}
    return loss, type(outputs[0])(loss=loss, **joined)


def _joined_values(layout: Layout, values: list[Any]) -> Any:
    first = values[0]
    if isinstance(first, list | tuple):
        return type(first)(_joined_values(layout, list(parts)) for parts in zip(*values, strict=True))
    if torch.is_tensor(first) and first.dim():
        return layout.join(values)
    if first is None:
        return None
    raise IndivisibleError("its model returns something that is not a tensor of one row an example")
