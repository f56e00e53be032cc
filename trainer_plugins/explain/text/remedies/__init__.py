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
from trainer_plugins.explain.text.states import (
    FOUR_BIT_BYTES,
    ROOM,
    States,
    copies_weights,
    read_states,
)
from trainer_plugins.explain.text.text_facts import TextFacts
from trainer_plugins.explain.text.told import ASKS_NEED
from trainer_plugins.units import size

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
_NUM_BYTES_OFFLOADED = 4  # of a parameter on the card: its weight and its gradient
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
    states, order = read_states(facts), _order(code, facts)
    is_of_states = code in ("optimizer-state", "load-too-large")
    if states is not None and code in ("host-kill", "host-limit"):
        yield from _keep_on_cards(states, facts)
    # A traceback shows a place; without one, the states are the best guess at a full card.
    elif states is not None and (is_of_states or (code == "capacity" and not facts.frames)):
        yield from _shrink_states(states, code, facts)
        too_weak = _list_too_weak(states)
        order = tuple(one for one in order if one not in too_weak)
    yield from choose_remedies(code, order, facts)


def _shrink_states(states: States, code: str, facts: TextFacts) -> Iterator[Remedy]:
    """Yield what makes the states fit, the cheapest to do first."""
    if not states.billions and states.is_full:
        without = (advice.SHARD_THE_RUN,) * states.could_be_sharded + (advice.ADAPTER,)
        yield from (remedy(one, spell_for(one, facts)) for one in without)
    if not states.billions or not (states.are_too_large or states.could_be_sharded):
        return
    now = states.count_bytes()
    fits, found = ROOM * states.room_bytes, False
    for one, num_bytes in _count_with(states):
        # The others depend on a place in the traceback, which such a text has not.
        applies = one is not advice.FOUR_BITS or _applies(one, code, facts)
        if num_bytes < min(now, fits) and applies:
            effect, found = f"{size(num_bytes)} instead of {size(now)} a card: {one.effect}", True
            yield remedy(one, spell_for(one, facts), effect, by_arithmetic=True)
    if not found and states.stage < 3:
        yield remedy(advice.SHARD_THE_RUN, spell_for(advice.SHARD_THE_RUN, facts))


def _keep_on_cards(states: States, facts: TextFacts) -> Iterator[Remedy]:
    """Yield sharding without offload, where offload filled main memory and the cards have room."""
    if not (states.billions and states.is_full and states.is_offloaded):
        return
    shard = states._replace(stage=3).count_bytes()
    if shard < ROOM * (states.card_bytes or 0):
        effect = f"{size(shard)} a card: shards the states over the cards' memory, without offload"
        spelled = spell_for(advice.SHARD_THE_RUN, facts)
        yield remedy(advice.SHARD_THE_RUN, spelled, effect, by_arithmetic=True)


def _list_too_weak(states: States) -> set[Advice]:
    """List what does not make too large states fit, by the same arithmetic."""
    if not states.are_too_large:
        return set()
    fits = ROOM * states.room_bytes
    weak = {one for one, num_bytes in _count_with(states) if num_bytes >= fits}
    return weak | {advice.FUSED_ADAMW if states.is_full else advice.HALF_PRECISION_WEIGHTS}


def _count_with(states: States) -> Iterator[tuple[Advice, int]]:
    """Yield the size of the states of one card with each advice, the cheapest to do first."""
    if states.num_ranks > 1 and states.stage < 3:
        yield advice.SHARD_THE_RUN, states._replace(stage=3).count_bytes()
    if states.is_full:
        if not states.stage:
            yield advice.EIGHT_BIT_ADAMW, states.count_bytes(moments=2)
            yield advice.ADAFACTOR, states.count_bytes(moments=0)
        left = states.billions * 1e9 * _NUM_BYTES_OFFLOADED / states.num_ranks
        yield advice.OFFLOAD_OPTIMIZER, int(left)
        yield advice.ADAPTER, states._replace(is_full=False).count_bytes()
    if states.is_full or states.weight_bytes > 1:
        four_bits = states._replace(is_full=False, weight_bytes=FOUR_BIT_BYTES)
        yield advice.FOUR_BITS, four_bits.count_bytes()


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
