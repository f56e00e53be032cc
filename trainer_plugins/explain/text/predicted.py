"""Predict remedies for a text that shows its run: model, method, rows, length and card.

Runs of two and of four layers, each a second or two, show what cannot fit: equal layers hold equal
tensors. The first remedy that may fit is planned with all layers, before it is named.
"""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from trainer_plugins import advice
from trainer_plugins.advice.entry import flags_in
from trainer_plugins.drycuda.cuda_build import site_with_cuda
from trainer_plugins.drycuda.predict import predict_one
from trainer_plugins.explain.answer import Explanation, Remedy
from trainer_plugins.explain.text.remedies.plan_command import RANK, list_words
from trainer_plugins.explain.text.settings import Settings
from trainer_plugins.explain.text.text_facts import TextFacts
from trainer_plugins.planner.compare.proposal import batch_flags
from trainer_plugins.planner.compare.switches import (
    change_flags,
    change_source,
    half_as_long,
    source_of,
    write_flags,
)
from trainer_plugins.planner.inputs import read_config, request_of
from trainer_plugins.planner.options import options_in
from trainer_plugins.planner.plan import PlanError
from trainer_plugins.planner.request import PlanRequest
from trainer_plugins.planner.tried import is_safe
from trainer_plugins.printable import printable
from trainer_plugins.units import size

OF_TRAINING = {"capacity", "long-sample", "logits-loss", "quadratic-attention", "optimizer-state"}
_FEW, _MORE = 2, 4  # layers; even, so that two kinds that alternate are as many
_LAYERS, _ROWS = "num_hidden_layers", "per_device_train_batch_size"
_USUAL_RANK = "16"  # of LoRA, where the text does not show it
_LONGEST_SECONDS = 120
_PLAN = advice.PLAN_THE_RUN.shell.partition("OPTIONS")[0]


def predict_remedies(said: Explanation, facts: TextFacts) -> Explanation:
    """Name the first remedy with which the run fits; leave out those that are not enough."""
    code = said.causes[0].code
    asked = _read_request(facts) if code in OF_TRAINING else None
    if asked is None:
        return said
    announce_plans(code)
    try:
        site_with_cuda()  # an explanation does not download torch
        return _predict(said, asked)
    except (ValueError, OSError, KeyboardInterrupt) as error:
        why = printable(error) or "it was interrupted"
        return replace(said, unknown=(*said.unknown, f"the effect of the remedies: {why}"))


def announce_plans(code: str) -> None:
    """Say on standard error that the answer will take a while, and the cause already."""
    sys.stderr.write(
        f"trainer-plugins explain: {code}; planning the remedies, which takes some seconds"
        " (Ctrl-C: answer without it)\n"
    )


def _predict(said: Explanation, asked: PlanRequest) -> Explanation:
    run = _Run(asked)
    needed = run.need_more_than_the_card()
    had = (said.numbers.allocated_bytes or 0) + (said.numbers.requested_bytes or 0)
    if needed is None or needed < had:
        raise PlanError(
            "the plan of what the text shows needs less memory than the run: something that the"
            " text does not show took the rest"
        )
    enough, others, unknown = list[Remedy](), list[Remedy](), list[str]()
    for one in said.remedies:
        changes = [*run.change(one.do)] if one.cause == said.causes[0].code else []
        if enough or not changes:
            others.append(one)
            continue
        try:
            known = (run.try_out(one, do, changed) for do, changed in changes)
            enough += filter(None, [next(filter(None, known), None)])
        except PlanError as error:
            others.append(one)
            unknown.append(f"the effect of {one.do}: {printable(error)}")
    if not enough:  # a plan also searches for several changes together
        others.sort(key=lambda each: not each.do.startswith(_PLAN))
    fact = f"the plan of what the text shows: more than {run.describe(needed)}"
    return replace(
        said,
        remedies=(*enough, *others),
        facts=(*said.facts, fact),
        unknown=(*said.unknown, *unknown),
    )


class _Run:
    """Predicts a run and its changes: by few layers what cannot fit, by all layers what does."""

    def __init__(self, asked: PlanRequest) -> None:
        assert asked.card is not None
        self._asked, self._card = asked, asked.card

    def need_more_than_the_card(self) -> int | None:
        """Return the bytes that the run needs at least; None if it fits."""
        least = self._count_least(self._asked)
        if least > self._card.capacity_bytes:
            return least
        plan = predict_one(self._asked, _LONGEST_SECONDS)
        return None if plan.fits_card else plan.needed_bytes

    def change(self, do: str) -> Iterator[tuple[str, PlanRequest]]:
        """Yield what to type and the run with it, then more of the same; nothing if unknown."""
        flags = flags_in(do)
        rows, steps = int(flags.get(_ROWS, 0)), int(flags.get("gradient_accumulation_steps", 1))
        if "max_length" in flags:
            yield do, half_as_long(self._asked)
        elif flags and not rows:
            yield do, change_flags(self._asked, **flags)
        while rows:
            changed = batch_flags(rows, rows * steps)
            yield write_flags(changed), change_flags(self._asked, **changed)
            rows, steps = rows // 2, steps * 2

    def try_out(self, one: Remedy, do: str, changed: PlanRequest) -> Remedy | None:
        """Return a remedy with its predicted peak; None if that does not fit."""
        if self._count_least(changed) > self._card.capacity_bytes:
            return None
        plan = predict_one(changed, _LONGEST_SECONDS)
        if not is_safe(plan):
            return None
        spare = plan.margin_bytes or 0
        peak = self.describe(plan.needed_bytes)
        effect = f"peaks at {peak}: it fits, with {size(spare)} to spare"
        known = replace(one, do=do, effect=effect, grade="predicted", spare_bytes=spare)
        return replace(known, predicted_peak_bytes=plan.needed_bytes)

    def describe(self, num_bytes: int) -> str:
        return f"{size(num_bytes)} of {size(self._card.capacity_bytes)}"

    def _count_least(self, asked: PlanRequest) -> int:
        """Return the bytes of tensors at the peak of all layers, and of the card's context."""
        config = source_of(asked).config
        few, more = (
            predict_one(
                change_source(replace(asked, card=None), config={**config, _LAYERS: number}),
                _LONGEST_SECONDS,
            ).moments
            for number in (_FEW, _MORE)
        )
        times = (int(str(config[_LAYERS])) - _FEW) / (_MORE - _FEW)
        peaks = [
            few[one].allocated_bytes
            + times * (more[one].allocated_bytes - few[one].allocated_bytes)
            for one in few.keys() & more.keys()
        ]
        return int(max(peaks)) + self._card.context_bytes


def _read_request(facts: TextFacts) -> PlanRequest | None:
    """Return the request of the run; None if its model is not known here."""
    named, (words, _) = Settings(facts).model, list_words(facts)
    if Path(named).is_file():
        return None
    try:
        config = read_config(named)
        options = options_in([_USUAL_RANK if word == RANK else word for word in words])
        return request_of(config, options) if config.get(_LAYERS) else None
    except (PlanError, OSError):
        return None
