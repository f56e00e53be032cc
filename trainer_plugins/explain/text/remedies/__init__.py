"""Choose remedies for each cause that a text shows, in the order of `advice.for_causes`."""

from collections.abc import Iterable, Iterator
from itertools import islice

from trainer_plugins import advice
from trainer_plugins.advice import Advice, Door
from trainer_plugins.advice.for_causes import ONE_ROW, ONLY_RUN, order_remedies
from trainer_plugins.explain.answer import Cause, Remedy
from trainer_plugins.explain.shared import remedies_for, remedy
from trainer_plugins.explain.text.followed import is_followed
from trainer_plugins.explain.text.remedies.applies import APPLIES, APPLIES_TO_CAUSE
from trainer_plugins.explain.text.remedies.filled import FILLED, uses_trainer
from trainer_plugins.explain.text.text_facts import TextFacts

_STRAW_FRACTION, _FULL_FRACTION = 0.02, 0.85
_OF_THE_TRAINER = (Door.TRAINER, Door.ARGUMENTS, Door.TRL)


def remedies_of(causes: Iterable[Cause], facts: TextFacts) -> tuple[Remedy, ...]:
    """Collect the remedies of the answer, then the first one of each other possible cause."""
    found: dict[str, Remedy] = {}
    for number, cause in enumerate(causes):
        offered = choose_remedies(cause.code, _order(cause.code, facts), facts)
        for one in offered if number == 0 else islice(offered, 1):
            found.setdefault(one.do, one)
    return tuple(found.values())


def choose_remedies(code: str, order: Iterable[Advice], facts: TextFacts) -> Iterator[Remedy]:
    """Yield the advice against a cause that applies to a text."""
    return remedies_for(code, order, lambda each: _build(each, code, facts), facts.vendor)


def _order(code: str, facts: TextFacts) -> tuple[Advice, ...]:
    order = order_remedies(code, "text")
    if code in ("capacity", "long-sample") and _is_last_straw(facts):
        return (advice.OBSERVE, *(each for each in order if each is not advice.OBSERVE))
    if code != "capacity":
        return order
    if facts.has_tried_one_row:
        return ONE_ROW
    uses = facts.find_call(r"(?i)\bgenerate|pipeline|pipe\(|\binfer|\bsample|predict|no_grad")
    trains = facts.find_call(r"(?i)backward|train|optimizer|closure")
    return ONLY_RUN if uses is not None and trains is None else order


def _is_last_straw(facts: TextFacts) -> bool:
    """Return whether a full card refused a small request after some steps: it may be a leak."""
    asked, live, total = facts.asked_bytes, facts.live_bytes, facts.total_bytes
    if not facts.progress or not uses_trainer(facts) or asked is None or not live or not total:
        return False
    return asked <= _STRAW_FRACTION * total and live >= _FULL_FRACTION * total


def _build(one: Advice, code: str, facts: TextFacts) -> Remedy | None:
    applies = APPLIES_TO_CAUSE.get((code, one)) or APPLIES.get(one)
    if is_followed(one, facts) or (applies is not None and not applies(facts)):
        return None
    if filled := FILLED.get(one):
        return filled(one, facts)
    if uses_trainer(facts):
        return remedy(one)
    door = next((each for each in one.spellings if each not in _OF_THE_TRAINER), None)
    return remedy(one, door) if door else None
