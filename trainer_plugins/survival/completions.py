"""Completions: TRL's GRPO and RLOO generate, and score without gradients, in parts.

We generate for as many prompts as fit at once. Sampling then draws differently from the same
distribution, and greedy answers are the same. Log-probabilities are computed row by row, so they do
not change. Ranks that share forward passes generate and score as before; so do vLLM and continuous
batching, whose memory torch does not manage.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from trainer_plugins.checkpointing import is_checkpointing, options, switch_on
from trainer_plugins.survival.attempt.attempt import DidNotFit, attempt
from trainer_plugins.survival.attempt.state import RestorePoint
from trainer_plugins.survival.training_run import Attached
from trainer_plugins.survival.words import report_in_parts

Method = Callable[..., Any]


class DividedCompletions:
    """Divides the two methods of a TRL trainer that make completions and score them."""

    def __init__(self, attached: Attached) -> None:
        self._attached, self._trainer = attached, attached.trainer
        self._most_generated = self._most_scored = 0  # rows at once that fit; 0: all did

    def methods(self) -> Iterator[tuple[str, Method]]:
        """Yield the TRL methods to replace, by name, with their replacements."""
        if self._attached.kind.forward_is_shared:
            return
        for name, divided in (
            ("_generate_single_turn", self._generate),
            ("_get_per_token_logps_and_entropies", self._score),
        ):
            owner = next((c for c in type(self._trainer).__mro__ if name in vars(c)), None)
            if owner is not None and owner.__module__.startswith("trl."):
                yield name, partial(divided, getattr(self._trainer, name))

    def _generate(
        self, original: Method, prompts: list[Any], images: Any, fields: Any, *args: Any, **kw: Any
    ) -> Any:
        trainer: Any = self._trainer
        others = getattr(trainer, "use_transformers_continuous_batching", False)
        if images is not None or fields or trainer.use_vllm or others:
            return original(prompts, images, fields, *args, **kw)
        most, failures, parts = self._most_generated or len(prompts), list[DidNotFit](), []
        while prompts:
            now, before = prompts[:most], RestorePoint(trainer)
            was_checkpointing = is_checkpointing(trainer.model)
            part = attempt(partial(original, now, None, fields, *args, **kw))
            if not isinstance(part, DidNotFit):
                parts.append(part)
                prompts = prompts[len(now) :]
                continue
            before.restore()
            if was_checkpointing and not is_checkpointing(trainer.model):
                # trl 1.16 leaves it off if generation fails
                switch_on(trainer.model, options(trainer.args))
            most = self._most_generated = _fewer(len(now), part, "one completion")
            failures.append(part)
        if failures:
            self._say(
                "completions to generate", len(parts), failures, "sampling draws in another order"
            )
        return _join(parts)

    def _score(
        self,
        original: Method,
        model: Any,
        ids: torch.Tensor,
        mask: torch.Tensor,
        num_kept: int,
        batch_size: int | None = None,
        **kw: Any,
    ) -> Any:
        if torch.is_grad_enabled():  # called by the loss, which is divided with its micro-batch
            return original(model, ids, mask, num_kept, batch_size, **kw)
        most, failures = min(batch_size or len(ids), self._most_scored or len(ids)), list[Any]()
        score = partial(original, model, ids, mask, num_kept, **kw)
        while isinstance(scored := attempt(partial(score, most)), DidNotFit):
            most = self._most_scored = _fewer(min(most, len(ids)), scored, "one row")
            failures.append(scored)
        if failures:
            num_parts = -(-len(ids) // most)
            self._say("rows to score", num_parts, failures, "log-probabilities are the same")
        return scored

    def _say(self, what: str, num: int, failures: list[DidNotFit], so: str) -> None:
        summary = f"{what} did not fit at once, and were computed in {num} parts: {so}"
        self._attached.say(
            report_in_parts(summary, failures, "the loss that follows is divided by itself.")
        )


def _fewer(num: int, failure: DidNotFit, least: str) -> int:
    if num < 2:
        raise failure.make_error(f"there is nothing smaller to try than {least}")
    return (num + 1) // 2


def _join(parts: list[Any]) -> Any:
    """Concatenate lists of rows, or, for tuples of lists as in GRPO, each position."""
    if not isinstance(parts[0], tuple):
        return [row for part in parts for row in part]
    places = zip(*parts, strict=True)
    return tuple(_join(list(one)) if one[0] else one[0] for one in places)
