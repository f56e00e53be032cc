"""Predict remedies for a text that shows its run: model, method, rows, length and card.

Runs of two and of four layers, each a second or two, show what cannot fit: equal layers hold equal
tensors. The first remedy that may fit is planned with all layers, before it is named.
"""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from trainer_plugins import advice
from trainer_plugins.drycuda.cuda_build import site_with_cuda
from trainer_plugins.drycuda.predict import predict_one
from trainer_plugins.explain.answer import Explanation, Remedy
from trainer_plugins.explain.text.remedies.plan_command import RANK, list_options
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
_LAYERS, _LENGTH = "num_hidden_layers", "max_length"
_ROWS, _STEPS = batch_flags(1, 1)
_USUAL_RANK = "16"  # of LoRA, where the text does not show it
_LONGEST_SECONDS = 120
_MOST_WITHOUT_GAPS = 0.75  # of a card; the largest gaps of 16 plans were 23 % of their tensors
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
        return leave_effects_open(said, error)


def leave_effects_open(said: Explanation, error: BaseException) -> Explanation:
    """Say why no plan shows the effect of the remedies: the cause is known even without one."""
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
    enough, short, others, unknown = list[Remedy](), list[Remedy](), list[Remedy](), list[str]()
    for one in said.remedies:
        if enough or one.cause != said.causes[0].code or not one.flags:
            others.append(one)
            continue
        try:
            found = run.make_fit(one)
            (short if found is None else enough).append(found or one)
        except PlanError as error:
            others.append(one)
            unknown.append(f"the effect of {one.do}: {printable(error)}")
    if not enough and len(short) > 1:
        enough += filter(None, [run.make_fit(_join(*short[:2]))])
    if not enough:  # a plan searches for more
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
        if least < _MOST_WITHOUT_GAPS * self._card.capacity_bytes:
            return None
        plan = predict_one(self._asked, _LONGEST_SECONDS)
        return None if plan.fits_card else plan.needed_bytes

    def make_fit(self, one: Remedy) -> Remedy | None:
        """Return a remedy, or more of it, with its predicted peak; None if it is not enough."""
        too_large: list[int] = []
        for do, changed in self._change(one.flags):
            # Half the rows save half of what twice as many saved.
            saved = too_large[-2] - too_large[-1] if len(too_large) > 1 else 0
            least = too_large[-1] - saved // 2 if saved else self._count_least(changed)
            if least > self._card.capacity_bytes:
                too_large.append(least)
                continue
            plan = predict_one(changed, _LONGEST_SECONDS)
            if is_safe(plan):
                peak, spare = self.describe(plan.needed_bytes), plan.margin_bytes or 0
                effect = f"peaks at {peak}: it fits, with {size(spare)} to spare"
                known = replace(one, do=do, effect=effect, grade="predicted", spare_bytes=spare)
                return replace(known, predicted_peak_bytes=plan.needed_bytes)
        return None

    def _change(self, flags: Mapping[str, str]) -> Iterator[tuple[str, PlanRequest]]:
        """Yield what to type and the run with it, then with ever fewer rows."""
        others = {name: value for name, value in flags.items() if name not in (_ROWS, _STEPS)}
        run = half_as_long(self._asked) if _LENGTH in others else self._asked
        run = change_flags(run, **{name: others[name] for name in others if name != _LENGTH})
        rows = int(flags.get(_ROWS, 0))
        total = rows * int(flags.get(_STEPS, 1))
        if not rows:
            yield write_flags(others), run
        while rows:
            changed = batch_flags(rows, total)
            yield write_flags({**changed, **others}), change_flags(run, **changed)
            rows //= 2

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


def _join(one: Remedy, other: Remedy) -> Remedy:
    prices = "; ".join(filter(None, (one.price, other.price)))
    return replace(one, do=f"{one.do} {other.do}", price=prices)


def _read_request(facts: TextFacts) -> PlanRequest | None:
    """Return the request of the run; None if its model is not known here."""
    named = facts.settings.model
    if Path(named).is_file():
        return None
    try:
        config = read_config(named)
        words = [_USUAL_RANK if word == RANK else word for word in list_options(facts)]
        options = options_in(words)
        return request_of(config, options) if config.get(_LAYERS) else None
    except (PlanError, OSError):
        return None
