"""Generation inside an evaluation (`predict_with_generate`): a batch that does not fit is generated in parts."""

from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import Seq2SeqTrainer

from trainer_plugins.survival.attempt.attempt import DidNotFit, attempt
from trainer_plugins.survival.attempt.snapshot import Snapshot
from trainer_plugins.survival.evaluation.parts import Parts, say_survived
from trainer_plugins.survival.exact.layouts import IndivisibleError, Inputs, find_layout
from trainer_plugins.survival.limit.limit import cells
from trainer_plugins.survival.run import Attached


class Generated:
    """Of one Trainer.

    Greedy and beam search give the same tokens; what is sampled is drawn in another order.
    """

    def __init__(self, attached: Attached) -> None:
        self._attached = attached
        self._parts = Parts()

    def is_ours(self) -> bool:
        """Whether the Trainer generates as transformers does, and no other rank takes part in it."""
        trainer = self._attached.trainer
        step = getattr(self._attached.prediction_step, "__func__", None)
        is_alone = not (trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled)
        return (
            is_alone
            and step is Seq2SeqTrainer.prediction_step
            and trainer.args.predict_with_generate
        )

    def step(self, model: nn.Module, inputs: Inputs, *args: Any, **kw: Any) -> Any:
        """Loss, tokens and labels, as `Seq2SeqTrainer.prediction_step` gives them."""
        trainer = self._attached.trainer

        def work(some: Inputs, *_: Any) -> Any:
            return self._attached.prediction_step(model, dict(some), False, *args, **kw)

        before, failures = Snapshot(trainer, "eval"), []
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
        # The Trainer's own, which comes to `compute_loss`, and is divided there.
        loss = trainer.prediction_step(model, inputs, True)[0] if "labels" in inputs else None
        return loss, *(self._joined([result[place] for result in results]) for place in (1, 2))

    def _joined(self, values: list[Any]) -> Any:
        if values[0] is None:
            return None
        width = max(value.shape[-1] for value in values)
        pad = self._attached.trainer._pad_tensors_to_max_len
        return torch.cat(
            [value if value.shape[-1] == width else pad(value, width) for value in values]
        )
