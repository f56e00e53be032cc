"""Order the rules that name a cause of a text: conclusive numbers and words come before places.

To add a cause, write its rule here and give it its place in `RULES`, its remedies in
`trainer_plugins/advice/for_causes.py`, and their conditions in
`trainer_plugins/explain/text/remedies/applies.py`. `docs/explain.md` explains its code, and
`tests/explain/corpus/` has a real text.
"""

from collections.abc import Iterable
from dataclasses import replace

from trainer_plugins.explain.answer import Cause
from trainer_plugins.explain.text.causes import arithmetic, numbers, off_card, others, place
from trainer_plugins.explain.text.text_facts import Rule, TextFacts

RULES: tuple[Rule, ...] = (
    # Impossible sizes.
    numbers.impossible_size,
    numbers.contradictory,
    # Others on the card.
    others.ddp_gpu0,
    others.own_ranks,
    others.data_parallel,
    others.engine_share,
    numbers.judge_spill,
    others.judge_catch,
    others.gave_up,
    others.judge_refused_load,
    # Not the card's memory.
    *off_card.RULES,
    numbers.pieces_beside_others,
    others.foreign,
    numbers.mps_other,
    arithmetic.judge_need,
    # The phase of the run.
    *place.PLACES,
    # What its settings and a person's words show.
    arithmetic.cut_command,
    arithmetic.judge_fault,
    arithmetic.judge_comparison,
    arithmetic.embeddings,
    arithmetic.outlier,
    arithmetic.states,
    others.judge_share,
    others.judge_told_leak,
    arithmetic.logits,
    arithmetic.pictures,
    # The rest: fragments, a shape, growth, size.
    numbers.fragmentation,
    numbers.mostly_cache,
    numbers.wrong_shape,
    place.long_sample,
    numbers.capacity,
)
_OF_STEPS = (arithmetic.states, arithmetic.logits, arithmetic.pictures)
_OUTSIDE_STEPS = {"adapter-merge", "host-kill", "load-too-large", "resume-load", "save-gather"}
_MOST_CAUSES = 3


def causes_of(facts: TextFacts) -> tuple[Cause, ...]:
    """Judge the facts: the answer first, then other possibilities if it is not certain."""
    found: dict[str, Cause] = {}
    for rule in RULES:
        if rule in _OF_STEPS and _OUTSIDE_STEPS & found.keys():
            continue
        if rule is numbers.capacity and found and not _leave_it_open(found.values(), facts):
            continue
        if (one := rule(facts)) is not None:
            if not found and (one.grade == "certain" or rule is arithmetic.judge_need):
                return (one,)
            doubt = facts.vendor.translate(one.doubt) or one.doubt
            found.setdefault(one.code, replace(one, doubt=doubt))
    return tuple(found.values())[:_MOST_CAUSES]


def _leave_it_open(found: Iterable[Cause], facts: TextFacts) -> bool:
    """Return whether an OOM may still be one of plain size: all causes found are guesses."""
    return all(each.grade == "possible" for each in found) and arithmetic.speaks_of_oom(facts)
