"""Remedies whose arithmetic fits: what shrinks weights, gradients and optimizer states enough."""

from collections.abc import Callable, Iterator

from trainer_plugins import advice
from trainer_plugins.advice import Advice
from trainer_plugins.explain.answer import Remedy
from trainer_plugins.explain.shared import remedy
from trainer_plugins.explain.text.frameworks import spell_for
from trainer_plugins.explain.text.states import FOUR_BIT_BYTES, ROOM, States
from trainer_plugins.explain.text.text_facts import TextFacts
from trainer_plugins.units import size

# The others depend on a place in the traceback, which such a text has not.
_CONDITIONAL = (advice.FOUR_BITS,)
_NUM_BYTES_OFFLOADED = 4  # of a parameter on the card: its weight and its gradient


def shrink_states(
    states: States, facts: TextFacts, applies: Callable[[Advice], bool]
) -> Iterator[Remedy]:
    """Yield what makes the states fit, the cheapest to do first."""
    if not states.billions:
        without = (advice.SHARD_THE_RUN,) * states.could_be_sharded + (advice.ADAPTER,)
        yield from (remedy(one, spell_for(one, facts)) for one in without)
        return
    now = states.count_bytes()
    fits, found = ROOM * states.room_bytes, False
    for one, num_bytes in _count_with(states):
        if num_bytes >= min(now, fits) or (one in _CONDITIONAL and not applies(one)):
            continue
        effect, found = f"{size(num_bytes)} instead of {size(now)} a card: {one.effect}", True
        yield remedy(one, spell_for(one, facts), effect, by_arithmetic=True)
    if not found and states.stage < 3:
        yield remedy(advice.SHARD_THE_RUN, spell_for(advice.SHARD_THE_RUN, facts))


def keep_on_cards(states: States | None, facts: TextFacts) -> Iterator[Remedy]:
    """Yield sharding without offload, where offload filled main memory and the cards have room."""
    if states is None or not (states.billions and states.is_full and states.is_offloaded):
        return
    shard = states._replace(stage=3).count_bytes()
    if shard < ROOM * (states.card_bytes or 0):
        effect = f"{size(shard)} a card: shards the states over the cards' memory, without offload"
        spelled = spell_for(advice.SHARD_THE_RUN, facts)
        yield remedy(advice.SHARD_THE_RUN, spelled, effect, by_arithmetic=True)


def list_too_weak(states: States | None) -> set[Advice]:
    """List what does not make too large states fit, by the same arithmetic."""
    if states is None or not states.are_too_large:
        return set()
    fits = ROOM * states.room_bytes
    weak = {one for one, num_bytes in _count_with(states) if num_bytes >= fits}
    return weak | {advice.FUSED_ADAMW if states.is_full else advice.HALF_PRECISION_WEIGHTS}


def _count_with(states: States) -> Iterator[tuple[Advice, int]]:
    if states.num_ranks > 1 and states.stage < 3:
        yield advice.SHARD_THE_RUN, states._replace(stage=3).count_bytes()
    if not states.is_full:
        if states.weight_bytes > 1:
            yield advice.FOUR_BITS, states._replace(weight_bytes=FOUR_BIT_BYTES).count_bytes()
        return
    if not states.stage:
        yield advice.EIGHT_BIT_ADAMW, states.count_bytes(moments=2)
        yield advice.ADAFACTOR, states.count_bytes(moments=0)
    left = states.billions * 1e9 * _NUM_BYTES_OFFLOADED / states.num_ranks
    yield advice.OFFLOAD_OPTIMIZER, int(left)
    adapted = states._replace(is_full=False)
    yield advice.ADAPTER, adapted.count_bytes()
    yield advice.FOUR_BITS, adapted._replace(weight_bytes=FOUR_BIT_BYTES).count_bytes()
