"""Build a proposal from changes, a micro-batch and their plan."""

from collections.abc import Sequence

from trainer_plugins.accumulation import Effect
from trainer_plugins.planner.compare.switches import Switch, write_flags
from trainer_plugins.planner.plan import MemoryPlan, Proposal, describe_least_seconds
from trainer_plugins.units import count_in_words


def batch_flags(micro_batch: int, rows: int) -> dict[str, object]:
    """Return the TrainingArguments that split a step's `rows` into micro-batches of this size."""
    return {
        "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": -(-rows // micro_batch),
    }


def rows_in_words(micro_batch: int, rows: int) -> str:
    """Write the micro-batch and the number of micro-batches in words."""
    steps = -(-rows // micro_batch)
    return f"{count_in_words(micro_batch, 'row')} x {count_in_words(steps, 'accumulation step')}"


def proposal_of(
    plan: MemoryPlan,
    changes: Sequence[Switch],
    *,
    micro_batch: int,
    now: int,
    rows: int,
    length: int,
    times: float | None,
    trainer: str | None,
) -> Proposal:
    """Propose changes with which a plan was made, with `micro_batch` of `rows` rows at once.

    The run as it is has `now` rows at once; `length` is in tokens; `times` is the step time
    relative to the run as it is; `trainer` names one of TRL's.
    """
    words = [each.words for each in changes]
    time = describe_least_seconds(plan.streamed.copy_seconds_per_step) if plan.streamed else ""
    prices = [
        each.price.replace("{time}", time)
        for each in changes
        if times is None or not each.costs_time
    ]
    flags = [each.flags for each in changes]
    in_the_run = [each.spell(trainer) for each in changes]
    if micro_batch != now:
        words.insert(0, rows_in_words(micro_batch, rows))
        effect = plan.accumulation
        if effect is not None and (times is None or effect.effect is not Effect.SAME):
            prices.insert(0, effect.price)  # unless the time says enough
        for each in (flags, in_the_run):
            each.insert(0, write_flags(batch_flags(micro_batch, rows)))
    if times is not None:
        factor = f"{times:.{int(times < 10)}f}"
        time = "the same time" if factor == "1.0" else f"{factor}x the time"
        prices.insert(0, f"about {time} per step")
    return Proposal(
        changes=tuple(words),
        price="; ".join(prices),
        flags=" ".join(flags),
        in_the_run=" ".join(in_the_run) if in_the_run == flags else ", ".join(in_the_run),
        micro_batch=micro_batch,
        accumulation_steps=rows // micro_batch,
        sequence_length=length,
        reserved_peak_bytes=plan.reserved_peak_bytes,
        nvidia_smi_peak_bytes=plan.nvidia_smi_peak_bytes,
        margin_bytes=plan.margin_bytes or 0,
        host_ram_bytes_per_node=plan.host_ram_bytes_per_node,
    )
