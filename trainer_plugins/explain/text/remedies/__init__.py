"""Choose remedies for each cause that a text shows, in the order of `advice.for_causes`."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice

from trainer_plugins import advice
from trainer_plugins.advice import Advice, Door
from trainer_plugins.advice.for_causes import ONE_ROW, ONLY_RUN, UNKNOWN, order_remedies
from trainer_plugins.checkpointing import spell
from trainer_plugins.explain.answer import Cause, Remedy
from trainer_plugins.explain.shared import remedies_for, remedy
from trainer_plugins.explain.text.causes import off_card
from trainer_plugins.explain.text.causes.arithmetic import speaks_of_oom
from trainer_plugins.explain.text.followed import is_followed
from trainer_plugins.explain.text.frameworks import spell_for
from trainer_plugins.explain.text.remedies import applies
from trainer_plugins.explain.text.remedies.filled import FILLED, WANTED_CARD, uses_trainer
from trainer_plugins.explain.text.remedies.less_states import (
    keep_on_cards,
    list_too_weak,
    shrink_states,
)
from trainer_plugins.explain.text.states import copies_weights, read_states
from trainer_plugins.explain.text.text_facts import TextFacts
from trainer_plugins.explain.text.told import ASKS_NEED

# Which advice leads where the text shows more than the cause.
_LEADS: tuple[tuple[str, Advice, applies.Test], ...] = (
    ("capacity|long-sample", advice.OBSERVE, applies.is_last_straw),
    (
        "adapter-merge",
        advice.MERGE_IN_MAIN_MEMORY,
        lambda facts: (
            spell_for(advice.MERGE_IN_MAIN_MEMORY, facts)
            or (not facts.frames and facts.says(r"(?i)\bexport(?! \w+=)"))
        ),
    ),
    ("leak", advice.OBSERVE, lambda facts: not facts.num_skipped),
    (
        "capacity",
        advice.PLAN_THE_RUN,
        lambda facts: not (facts.frames or facts.asked_bytes or speaks_of_oom(facts)),
    ),
    (
        "capacity|long-sample|logits-loss",
        advice.CHECKPOINTING,
        applies.says(r"gradient_checkpointing[\"']?[ =:]{1,3}[Ff]alse"),
    ),
    (
        "capacity",
        advice.LIGER,
        applies.says(r"(?i)liger(?:_kernel)?[\"'`]?(?: to|:|=)? ?[\"']?false"),
    ),
    ("capacity", advice.EIGHT_BIT_ADAMW, applies.is_called(r"[/\\]optim[/\\]")),
    ("save-gather|ddp-gpu0", advice.OBJECTS_IN_MAIN_MEMORY, applies.says("all_gather_object")),
    ("save-gather", advice.SAVE_ONLY_MODEL, applies.SAVES_STATES),
    ("load-too-large|optimizer-state", advice.SHARD_THE_RUN, copies_weights),
    ("foreign", advice.OTHER_CARD, applies.says(WANTED_CARD)),
    (
        "long-sample",
        advice.OBSERVE,
        lambda facts: (
            not (facts.asked_bytes or facts.progress) and facts.settings.rows in (None, 1)
        ),
    ),
    ("long-sample", advice.SHORTER_ROWS, lambda facts: facts.settings.rows == 1),
    ("host-kill", advice.SAVE_ONLY_MODEL, applies.SAVES_BESIDE_RANKS),
    ("host-kill", advice.SAVE_THE_ADAPTER, applies.says(off_card.MERGES)),
    ("host-kill", advice.LIGHTER_SAMPLES, applies.says(applies.LONG_SAMPLES)),
    (
        "host-kill",
        advice.FEWER_WORKERS,
        applies.says(r"dataloader_num_workers\W{1,3}(?:[2-9]\d|\d{3})"),
    ),
)
_OF_THE_TRAINER = (Door.TRAINER, Door.ARGUMENTS, Door.TRL)


def remedies_of(causes: Iterable[Cause], facts: TextFacts) -> tuple[Remedy, ...]:
    """Collect the remedies of the answer, then the first one of each other possible cause."""
    found: dict[str, Remedy] = {}
    for number, cause in enumerate(causes):
        offered = _offer(cause.code, facts)
        for one in offered if number == 0 else islice(offered, 1):
            found.setdefault(one.do, replace(one, cause=cause.code))
    return tuple(replace(one, do=spell(one.do, for_any=True)) for one in found.values())


def _offer(code: str, facts: TextFacts) -> Iterator[Remedy]:
    too_weak: set[Advice] = set()
    states = read_states(facts)
    if code in ("host-kill", "host-limit"):
        yield from keep_on_cards(states, facts)
    is_of_states = code in ("optimizer-state", "load-too-large")
    # A traceback shows a place; without one, the states are the best guess at a full card.
    if is_of_states or (code == "capacity" and not facts.frames):
        too_weak = list_too_weak(states)
        if states is not None and states.may_shrink:
            yield from shrink_states(states, facts, lambda one: _applies(one, code, facts))
    order = [one for one in _order(code, facts) if one not in too_weak]
    yield from choose_remedies(code, order, facts)


def choose_remedies(code: str, order: Iterable[Advice], facts: TextFacts) -> Iterator[Remedy]:
    """Yield the advice against a cause that applies to a text."""
    return remedies_for(code, order, lambda each: _build(each, code, facts), facts.vendor)


def _order(code: str, facts: TextFacts) -> tuple[Advice, ...]:
    order = order_remedies(code, "text")
    if code == "capacity" and ASKS_NEED.search(facts.oom.text):
        return (advice.PLAN_THE_RUN, advice.ADAPTER, advice.FOUR_BITS)
    first = next(
        (one for each, one, when in _LEADS if re.fullmatch(each, code) and when(facts)), None
    )
    if first is not None:
        return (first, *(each for each in order if each is not first))
    if code != "capacity":
        return order
    rows = facts.settings.rows
    if facts.has_tried_one_row or rows == 1:
        return (*ONE_ROW, advice.FOUR_BITS)
    states = read_states(facts)
    is_sized = states is not None and states.billions
    if not (facts.frames or facts.asked_bytes or facts.total_bytes or rows or is_sized):
        return UNKNOWN
    uses = facts.find_call(r"(?i)\bgenerate|pipeline|pipe\(|\binfer|\bsample|predict|no_grad")
    trains = facts.find_call(r"(?i)backward|train|optimizer|closure")
    return ONLY_RUN if uses is not None and trains is None else order


def _applies(one: Advice, code: str, facts: TextFacts) -> bool:
    test = applies.APPLIES_TO_CAUSE.get((code, one)) or applies.APPLIES.get(one)
    return not is_followed(one, facts) and (test is None or bool(test(facts)))


def _build(one: Advice, code: str, facts: TextFacts) -> Remedy | None:
    if not _applies(one, code, facts):
        return None
    if spelled := spell_for(one, facts):
        return remedy(one, spelled)
    if filled := FILLED.get(one):
        return filled(one, facts)
    if uses_trainer(facts):
        return remedy(one)
    door = next((each for each in one.spellings if each not in _OF_THE_TRAINER), None)
    return remedy(one, door) if door else None
