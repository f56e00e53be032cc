"""Judge whether a planned run fits on its card and in its main memory."""

from trainer_plugins import advice
from trainer_plugins.advice import Door
from trainer_plugins.check.facts import Check, CheckLine, Facts
from trainer_plugins.finding import Data, Finding, Severity
from trainer_plugins.planner.plan import MemoryPlan, describe_least_seconds
from trainer_plugins.units import percent, size

_NARROW = 0.05
_ACTIVATIONS = ("activations", "logits and loss")


def card(facts: Facts) -> CheckLine | None:
    """Judge whether the run fits on its card, both empty and with the memory now in use."""
    plan = facts.plan
    if plan is None:
        finding = Finding(
            code="plan-not-made",
            severity=Severity.INFO,
            summary="the memory that this run needs could not be predicted",
            evidence=facts.no_plan,
            remedy="Try `trainer-plugins plan` with other flags; all other checks ran",
        )
        return CheckLine("the card", "", (finding,)) if facts.no_plan else None
    found = (_room(plan, facts), _adapters(plan), _suggest_streaming(plan, facts.streamed_plan))
    return CheckLine("the card", _numbers(plan), tuple(filter(None, found)))


def main_memory(facts: Facts) -> CheckLine | None:
    """Judge whether the ranks of a machine fit in its main memory."""
    plan = facts.plan
    if plan is None:
        return None
    seen = f"{size(plan.host_bytes_per_node)} per node"
    if plan.host_shortage is None:
        return CheckLine("main memory", seen)
    finding = Finding.error(
        code="plan-host-memory",
        summary=f"the run does not fit: {plan.host_shortage}",
        evidence=f"{size(plan.host_ram_bytes_per_node)} of tensors, of which"
        f" {size(plan.host_pinned_bytes_per_node)} are pinned, and"
        f" {size(plan.host_process_bytes_per_node)} for Python and its libraries",
        remedy="Spread it over more machines; pin less:"
        f" {advice.NO_PINNED_OFFLOAD.flag(Door.DEEPSPEED)}; put the optimizer on NVMe:"
        f" {advice.OFFLOAD_TO_DISK.flag(Door.SHELL)}; or train adapters",
        amount=float(plan.host_bytes_per_node),
        data={
            "tensor_bytes": plan.host_ram_bytes_per_node,
            "pinned_bytes": plan.host_pinned_bytes_per_node,
            "process_bytes": plan.host_process_bytes_per_node,
        },
    )
    return CheckLine("main memory", seen, (finding,))


CHECKS: tuple[Check, ...] = (card, main_memory)


def _room(plan: MemoryPlan, facts: Facts) -> Finding | None:
    amount, free = float(plan.needed_bytes), facts.device_free_bytes
    if plan.fits_card is False:
        return Finding.error(
            code="plan-does-not-fit",
            summary=f"the run does not fit on the card: it needs {_numbers(plan)}",
            evidence=plan.failed_request or f"{size(plan.allocated_peak_bytes)} of tensors",
            remedy="`trainer-plugins plan` with the same flags lists changes that make it fit",
            amount=amount,
            data=_data(plan),
        )
    if free is not None and plan.needed_bytes > free:
        return Finding.error(
            code="card-too-full",
            summary=f"the run needs {size(plan.needed_bytes)}, but {size(free)} is free now",
            evidence=f"predicted for {plan.moment}; other processes hold the rest",
            remedy=f"Stop other processes, or {advice.OTHER_CARD.flag(Door.ENVIRONMENT)}",
            amount=amount,
            data={**_data(plan), "free_bytes": free},
        )
    if plan.margin_bytes is None or plan.margin_bytes >= _NARROW * (plan.capacity_bytes or 0):
        return None
    return Finding.warning(
        code="plan-is-tight",
        summary=f"the run fits with only {size(plan.margin_bytes)} to spare: {_numbers(plan)}",
        evidence=plan.known_error or "a prediction",
        remedy=f"Use {facts.fewer_rows}, or {advice.SURVIVE.flag(Door.CODE)}",
        amount=amount,
        data=_data(plan),
    )


def _data(plan: MemoryPlan) -> Data:
    sizes = {"needed_bytes": plan.needed_bytes, "capacity_bytes": plan.capacity_bytes}
    known = {name: num for name, num in sizes.items() if num is not None}
    return {**known, "moment": plan.moment}


def _numbers(plan: MemoryPlan) -> str:
    there = "" if plan.capacity_bytes is None else f" of {size(plan.capacity_bytes)}"
    return f"{size(plan.needed_bytes)}{there} in {plan.moment}"


def _suggest_streaming(plan: MemoryPlan, streamed: MemoryPlan | None) -> Finding | None:
    if streamed is None or streamed.streamed is None or not streamed.fits:
        return None
    base = streamed.streamed
    several = (
        f"; DeepSpeed ZeRO-3 with offload_param keeps one copy of the base for all"
        f" {plan.num_gpus} ranks, where streaming keeps one for each"
        if plan.num_gpus > 1
        else ""
    )
    return Finding(
        code="streaming-would-fit",
        severity=Severity.INFO,
        summary=f"the run fits if you stream its frozen base: {_numbers(streamed)}",
        evidence=f"{size(base.num_bytes)} stay in main memory, {base.resident_layers} of"
        f" {base.num_layers} layers are on the card; "
        + describe_least_seconds(base.copy_seconds_per_step),
        remedy=f"Add the callback StreamBase ({advice.STREAM_BASE.flag(Door.TRAINER)}){several}",
        amount=float(streamed.needed_bytes),
        data=_data(streamed),
    )


def _adapters(plan: MemoryPlan) -> Finding | None:
    frozen = plan.num_parameters - plan.num_trainable_parameters
    if plan.fits_card is not False or frozen < plan.num_trainable_parameters:
        return None
    taken = sum(plan.breakdown.get(name, 0) for name in _ACTIVATIONS)  # type: ignore[call-overload]
    part = taken / plan.allocated_peak_bytes if plan.allocated_peak_bytes else 0.0
    if part < 1 / 2:
        return None
    return Finding.warning(
        code="adapters-save-little",
        summary=f"adapters do not reduce activations and logits, {percent(part)} of the peak",
        evidence=f"{size(taken)} of {size(plan.allocated_peak_bytes)} (peft#1514)",
        remedy=f"{advice.CHECKPOINTING.flag(Door.TRAINER)}, or fewer rows or tokens",
        amount=part,
        data={"activation_bytes": taken, "allocated_peak_bytes": plan.allocated_peak_bytes},
    )
