"""The rules by which a text names a cause, in the order in which they lead.

The first that applies is the answer, the next ones are "also possible". What numbers or words prove
comes before what a place in the code suggests.
"""

from collections.abc import Callable

from trainer_plugins.explain.answer import Cause
from trainer_plugins.explain.text.causes import engine, frames, host, numbers, others
from trainer_plugins.explain.text.facts import Facts

RULES: tuple[Callable[[Facts], Cause | None], ...] = (
    # Sizes that cannot be meant.
    numbers.impossible_size,
    numbers.contradictory,
    # Who else is on the card.
    others.ddp_gpu0,
    others.data_parallel,
    engine.engine_share,
    numbers.spilled,
    others.kept_after_catch,
    others.gave_up,
    others.other_framework,
    # Not the card's memory.
    host.shm,
    host.host_limit,
    host.host_kill,
    host.host_commit,
    host.host_alloc,
    host.nccl,
    host.pinned,
    others.foreign,
    numbers.mps_other,
    # What the run was doing.
    frames.eval_logits,
    frames.eval_batch,
    frames.save_gather,
    frames.resume_load,
    frames.shard_too_large,
    frames.load_too_large,
    frames.adapter_delta,
    frames.logits_loss,
    frames.image_size,
    frames.quadratic_attention,
    frames.generate_cache,
    frames.optimizer_state,
    frames.zero3_gather,
    others.leftover,
    frames.move_too_large,
    frames.before_training,
    frames.generation,
    # What is left: pieces, a shape, growth, size.
    numbers.fragmentation,
    numbers.wrong_shape,
    frames.long_sample,
    numbers.capacity,
)
_MOST_CAUSES = 3


def causes_of(facts: Facts) -> tuple[Cause, ...]:
    """Judge the facts: the answer first, then what is possible too if it is not certain."""
    found: list[Cause] = []
    for rule in RULES:
        cause = None if found and rule is numbers.capacity else rule(facts)
        if cause and cause.code not in [one.code for one in found]:
            found.append(cause)
        if found and found[0].grade == "certain":
            break
    return tuple(found[:_MOST_CAUSES])
