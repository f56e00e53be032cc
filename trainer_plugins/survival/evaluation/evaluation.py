"""Evaluation: a batch that does not fit is computed in parts.

There are no gradients, so there is nothing to undo.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from trainer_plugins.survival.attempt.attempt import DidNotFit, attempt
from trainer_plugins.survival.attempt.restore_point import RestorePoint
from trainer_plugins.survival.attempt.state import State
from trainer_plugins.survival.certificate.certificate import Certificate, batch_kind
from trainer_plugins.survival.evaluation.generated import Generated
from trainer_plugins.survival.evaluation.parts import Parts, say_survived
from trainer_plugins.survival.exact.delegated import check_delegated
from trainer_plugins.survival.exact.layouts import IndivisibleError, Inputs, Layout, find_layout
from trainer_plugins.survival.exact.modules import owners_of_state
from trainer_plugins.survival.exact.shares import Weight
from trainer_plugins.survival.limit.limit import cells, sizes
from trainer_plugins.survival.ranks import Alone, kind_of
from trainer_plugins.survival.ranks.gathers import Gathers
from trainer_plugins.survival.training_run import Attached

Outputs = dict[str, Any]
"""A model's outputs by name: a `ModelOutput`, or a dictionary."""

Result = torch.Tensor | tuple[torch.Tensor, Outputs]
"""What `compute_loss` returns: the loss, or the loss and the outputs."""

Compute = Callable[[Inputs], Result]


class Evaluation:
    """Finishes the evaluation batches of one Trainer that did not fit.

    It has a limit of its own, since nothing is kept for a backward pass.
    """

    def __init__(self, attached: Attached) -> None:
        self._attached = attached
        self._parts = Parts()
        self._generated = Generated(attached)
        self._certificates: dict[bool, Certificate] = {}
        """One for losses that are divided by a number of the caller's, as the Trainer's, or not."""
        self._is_over_items = False
        self._are_outputs_wanted = True
        self._gathers = Gathers(attached.trainer)
        self._owners: dict[str, object] | None = None

    def begin_run(self) -> None:
        """Forget what was measured: it was of the model of another run."""
        self._certificates.clear()
        self._owners = None

    def prediction_step(
        self,
        model: nn.Module,
        inputs: Inputs,
        prediction_loss_only: bool,
        *args: object,
        **kw: object,
    ) -> object:
        """Replace `trainer.prediction_step`, to know whether outputs are wanted."""
        self._are_outputs_wanted = not prediction_loss_only
        try:
            if not prediction_loss_only and self._generated.is_ours():
                return self._generated.step(model, inputs, *args, **kw)
            return self._attached.prediction_step(model, inputs, prediction_loss_only, *args, **kw)
        finally:
            self._are_outputs_wanted = True

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Inputs,
        return_outputs: bool,
        num_items: torch.Tensor | int | None,
    ) -> Result:
        """Compute the loss, and the outputs if they are wanted, as `trainer.compute_loss` does."""
        trainer = self._attached.trainer

        def original(some: Inputs) -> Result:
            result: Result = self._attached.compute_loss(
                model, some, return_outputs=return_outputs, num_items_in_batch=num_items
            )
            return result

        if kind_of(trainer).forward_is_shared:
            return original(inputs)

        def compute(some: Inputs) -> Result:
            with self._gathers.held():
                return original(dict(some))  # trainers take labels out of theirs

        self._gathers.begin()
        self._is_over_items = num_items is not None
        before = self._before()
        if cells(inputs) > self._parts.limit:
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

    def _in_parts(self, compute: Compute, inputs: Inputs, failures: list[DidNotFit]) -> Result:
        family, trainer = self._attached.family, self._attached.trainer
        layout = find_layout(family.layouts, inputs)
        num, before = layout.count(inputs), self._before()
        if failures:
            self._parts.failed(num, cells(inputs))
        elif num == 1:
            raise IndivisibleError("it is one example")
        weight = self._weight(layout, inputs, compute, before)
        whole, whole_share = weight.of(inputs, num), family.share.of(inputs, num)

        def work(part: Inputs, num_of_part: int, is_last: bool) -> Result:
            share = family.share.share(family.share.of(part, num_of_part), whole_share)
            return self._compute_part(compute, part, share, is_last)

        results = []
        for part, num_of_part, result, is_last in self._parts.each(
            layout, inputs, failures, before, work
        ):
            results.append((result, weight.share(weight.of(part, num_of_part), whole)))
            if not is_last:
                before.begin_next()  # the metrics of the last part are those of the whole
        if failures:
            say_survived(
                trainer, f"{num} {layout.unit} ({cells(inputs)} cells)", failures, len(results)
            )
        return _joined(layout, results)

    def _before(self) -> RestorePoint:
        if self._owners is None:
            self._owners = owners_of_state(self._attached.trainer.model)
        return RestorePoint(self._attached.trainer, "eval", State(self._owners))

    def _compute_part(self, compute: Compute, part: Inputs, share: float, is_last: bool) -> Result:
        with self._gathers.piece(share, is_last):
            result = compute(part)
        check_delegated(self._attached.compute_loss)
        if isinstance(result, tuple):
            loss, outputs = result
            return loss, self._kept(outputs)
        return result

    def _kept(self, outputs: object) -> Outputs:
        """Return what the Trainer keeps of the outputs: no caches, and nothing for a mere loss.

        Raises:
            IndivisibleError: the outputs have no names.
        """
        if not isinstance(outputs, dict):
            raise IndivisibleError(
                f"its model returns a {type(outputs).__name__}, in which nothing has a name"
            )
        dropped = getattr(
            self._attached.trainer.model.config, "keys_to_ignore_at_inference", ["past_key_values"]
        )
        wanted = {
            n: v
            for n, v in outputs.items()
            if self._are_outputs_wanted and n not in (*dropped, "loss")
        }
        return type(outputs)(**wanted)

    def _weight(
        self, layout: Layout, inputs: Inputs, compute: Compute, before: RestorePoint
    ) -> Weight:
        trainer, certificate = self._attached.trainer, self._certificates.get(self._is_over_items)
        if certificate is None:
            certificate = Certificate(
                trainer, Alone(trainer, trainer.model), self._attached.family, is_trained=False
            )
            self._certificates[self._is_over_items] = certificate
        if certificate.wants(kind := batch_kind(layout, inputs), inputs):

            def loss(some: Inputs) -> torch.Tensor:
                result = compute(some)
                check_delegated(self._attached.compute_loss)
                value: torch.Tensor = result[0] if isinstance(result, tuple) else result
                return value

            num_fit = max(sizes(layout.count(inputs), cells(inputs), self._parts.limit, 1))
            gathers, is_first = self._gathers, not certificate.knows(layout)
            try:
                with gathers.measuring() if is_first else gathers.apart():
                    certificate.measure(layout, inputs, num_fit, loss, before.restore)
            finally:
                before.restore()
        return certificate.weight(layout, kind)


def _joined(layout: Layout, results: list[tuple[Result, float]]) -> Result:
    """Join the results of all parts, each with its factor, to that of the whole."""
    losses = [result[0] if isinstance(result, tuple) else result for result, _ in results]
    # What weighs nothing is left out: a mean over no token is not a number.
    loss: Any = sum(
        loss * factor for loss, (_, factor) in zip(losses, results, strict=True) if factor
    )
    outputs = [result[1] for result, _ in results if isinstance(result, tuple)]
    if not outputs:
        return torch.as_tensor(loss)
    joined = {name: _joined_values(layout, [one[name] for one in outputs]) for name in outputs[0]}
    return loss, type(outputs[0])(loss=loss, **joined)


def _joined_values(layout: Layout, values: list[Any]) -> object:
    first = values[0]
    if isinstance(first, list | tuple):
        return type(first)(
            _joined_values(layout, list(parts)) for parts in zip(*values, strict=True)
        )
    if torch.is_tensor(first) and first.dim():
        return layout.join(values)
    if first is None:
        return None
    raise IndivisibleError("its model returns something that is not a tensor of one row an example")
