"""Causes beside the run's own step: other memory than the card's, processes, and models."""

import re

from trainer_plugins.explain.answer import Cause
from trainer_plugins.explain.run.case import Case
from trainer_plugins.explain.shared import (
    are_alike,
    cause,
    quoted,
    said,
)
from trainer_plugins.record.oom_record import LiveModel

_ENGINE = re.compile(r"\b(?:vllm|sglang)\b", re.IGNORECASE)
_KILLED = "is killed by signal: Killed"
# The causes that the source of an error decides.
_BY_SOURCE = {"nccl": "nccl", "pinned": "pinned", "shared": "shm", "host": "host-alloc"}


def other_memory(case: Case) -> Cause | None:
    """Find an error of NCCL, of pinned or shared memory, or of main memory."""
    words, _, _ = case.record.error.text.partition("\n")
    code = _BY_SOURCE.get(case.record.error.source)
    if code is None:
        return None
    is_kill = _KILLED in words
    host = case.record.host
    return cause(
        "host-kill" if is_kill else code,
        f"the error reads: {quoted(words)}",
        said(
            "main memory had {host_free_bytes} free of {host_total_bytes}, /dev/shm"
            " {shm_free_bytes} of {shm_total_bytes}",
            host_free_bytes=host.free_bytes,
            host_total_bytes=host.total_bytes,
            shm_free_bytes=host.shm_free_bytes,
            shm_total_bytes=host.shm_total_bytes,
        )
        if host
        else "",
        summary="a dataloader worker was killed, as when main memory is full" if is_kill else "",
        doubt="dmesg shows whether the kernel did it" if is_kill else "",
    )


def other_processes(case: Case) -> Cause | None:
    """Find other processes that hold what was missing."""
    foreign, limit = case.foreign, case.record.error.limit_bytes
    if limit is not None and case.free >= case.asked:
        return None  # it was not the card that was full
    if not foreign or foreign < 0.1 * case.total or case.asked > case.free + foreign:
        return None
    listed = [each for each in case.record.processes or () if not each.is_own]
    names = [f"pid {each.pid} ({each.name or 'name unknown'})" for each in listed]
    is_engine = any(_ENGINE.search(name) for name in names)
    own = sum(each.used_bytes or 0 for each in case.record.processes or () if each.is_own)
    sizes = [each.used_bytes or 0 for each in listed]
    are_ranks = case.record.run.world_size > 1 and not is_engine and are_alike(own, sizes)
    return cause(
        "engine-share" if is_engine else "ddp-gpu0" if are_ranks else "foreign",
        said(
            "of {capacity_bytes}, {foreign_bytes} are others', {allocated_bytes} were in tensors of"
            " this run and {free_bytes} free",
            foreign_bytes=foreign,
            **case.stated,
        ),
        ", ".join(names),
        said("without it the {requested_bytes} that were refused would have fitted", **case.stated),
        grade="certain" if listed and case.record.run.world_size == 1 else "likely",
    )


def leftover(case: Case) -> Cause | None:
    """Find copies of the run's own model that are still held."""
    others = second_models(case)
    copies = [
        each for each in case.models if each.name == case.record.run.model and each not in others
    ]
    held = sum(each.num_bytes for each in copies[1:])
    if len(copies) < 2 or held < 0.1 * case.total:
        return None
    return cause(
        "leftover",
        said(
            "the others take {held_bytes} in addition to the {largest_model_bytes} of the largest",
            held_bytes=held,
            largest_model_bytes=copies[0].num_bytes,
        ),
        summary=f"{len(copies)} models of the class {copies[0].name} are on the card: an earlier"
        " run, or a second copy, is still held",
        num_models=len(copies),
    )


def second_models(case: Case) -> list[LiveModel]:
    """Return the models that the run uses beside the one that it trains, the largest first."""
    run = case.record.run
    of_trainer = re.compile(rf"\b{re.escape(run.trainer)}\.(?!model\b|model_wrapped\b)\w+$")
    return [each for each in case.models if run.trainer and of_trainer.search(each.holder)]


def second_model(case: Case) -> Cause | None:
    """Find a model that the run uses beside the one that it trains."""
    models = second_models(case)
    held = sum(each.num_bytes for each in models)
    if not models or held < 0.1 * case.total:
        return None
    largest = models[0]
    return cause(
        "second-copy",
        said(
            "{held_bytes} of {capacity_bytes} are the weights of {name} ({place})",
            held_bytes=held,
            name=largest.name,
            place=largest.place,
            **case.stated,
        ),
        grade="likely",
    )
