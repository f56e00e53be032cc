"""Generated: a batch of `predict_with_generate` that does not fit is generated in parts."""

from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import Seq2SeqTrainer

from trainer_plugins.survival.attempt.attempt import DidNotFit, attempt
from trainer_plugins.survival.attempt.restore_point import RestorePoint
from trainer_plugins.survival.evaluation.parts import Parts, say_survived
from trainer_plugins.survival.exact.layouts import IndivisibleError, Inputs, find_layout
from trainer_plugins.survival.limit.limit import cells
from trainer_plugins.survival.ranks import kind_of
from trainer_plugins.survival.training_run import Attached

Predicted = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
"""Loss, tokens and labels, as `Seq2SeqTrainer.prediction_step` returns them."""


class Generated:
    """Divides what one Trainer generates in its evaluations.

    Greedy and beam search give the same tokens; what is sampled is drawn in another order.
    """

    def __init__(self, attached: Attached) -> None:
        self._attached = attached
        self._parts = Parts()

    def is_ours(self) -> bool:
        """Tell whether the Trainer generates as transformers does, without other ranks."""
        trainer: Any = self._attached.trainer
        step = getattr(self._attached.prediction_step, "__func__", None)
        return (
            not kind_of(trainer).forward_is_shared
            and step is Seq2SeqTrainer.prediction_step
            and trainer.args.predict_with_generate
        )

    def step(self, model: nn.Module, inputs: Inputs, *args: object, **kw: object) -> Predicted:
        """Predict a batch as `Seq2SeqTrainer.prediction_step` does."""
        trainer = self._attached.trainer

        def work(some: Inputs, *_: object) -> Predicted:
            step: Predicted = self._attached.prediction_step(model, dict(some), False, *args, **kw)
            return step

        before, failures = RestorePoint(trainer, "eval"), []
        if cells(inputs) <= self._parts.limit:
            result = attempt(partial(work, inputs))
            if not isinstance(result, DidNotFit):
                return result
            before.restore()
            failures.append(result)
        try:
            layout = find_layout(self._attached.family.layouts, inputs)
            if failures:
                self._parts.failed(layout.count(inputs), cells(inputs))
            results = [
                result
                for _, _, result, _ in self._parts.each(layout, inputs, failures, before, work)
            ]
        except IndivisibleError as error:
            if not failures:
                return work(inputs)  # the limit is that of other batches
            raise failures[0].as_error(str(error)) from None
        if failures:
            say_survived(
                trainer,
                f"{layout.count(inputs)} {layout.unit} to generate from",
                failures,
                len(results),
            )
        # The Trainer's own step calls `compute_loss`, and the batch is divided there.
        loss = trainer.prediction_step(model, inputs, True)[0] if "labels" in inputs else None
        return (
            loss,
            self._joined([tokens for _, tokens, _ in results]),
            self._joined([labels for _, _, labels in results]),
        )

    def _joined(self, parts: list[torch.Tensor | None]) -> torch.Tensor | None:
        """Join the rows of all parts, padded to the longest; None if there are none."""
        values = [part for part in parts if part is not None]
        if not values:
            return None
        width = max(value.shape[-1] for value in values)
        trainer: Any = self._attached.trainer
        pad = trainer._pad_tensors_to_max_len
        return torch.cat(
            [value if value.shape[-1] == width else pad(value, width) for value in values]
        )
