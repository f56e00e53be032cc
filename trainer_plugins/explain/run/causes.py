"""Judge the causes of a recorded out-of-memory error, with facts that text alone lacks."""

import re
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

from trainer_plugins.explain.answer import Cause
from trainer_plugins.explain.run.case import WARM_UP_STEPS, Case
from trainer_plugins.explain.shared import (
    FRAGMENTED_FRACTION,
    are_alike,
    cause,
    insert_sentence,
    is_in_pieces,
)
from trainer_plugins.explain.sizes import is_size_of, match_tokens
from trainer_plugins.explain.text import causes as by_words
from trainer_plugins.explain.text.causes import numbers, off_card, others, place
from trainer_plugins.explain.text.text_facts import Rule
from trainer_plugins.record.timeline import Remark

_FEWEST_STEPS = 5
_OFF_CARD = ("nccl", "pinned", "shared", "host")  # the sources of such an error
# Causes shown by words and frames, if no number of the record shows another.
_BY_WORDS_ALONE = ("api-misuse", "ddp-gpu0", "image-size", "mps-other")
_SHAPE = " ({num_rows} x {num_tokens} tokens)"

_ZERO3 = "all_gather_params|all_gather_coalesced|fetch_sub_module"


def causes_of(case: Case) -> tuple[Cause, ...]:
    """Return the causes that the record shows, the decisive one first; at least one."""
    found = [one for rule in RULES if (one := rule(case)) is not None]
    shown = [each for each in found if each.grade != "possible"] or [_capacity(case)]
    return (*shown, *(each for each in found if each.grade == "possible"))


def _judge_error(case: Case) -> Cause | None:
    """Judge by the error alone, with the rules for texts; only one kind of doubt remains."""
    is_off_card = case.record.error.source in _OFF_CARD
    rules: tuple[Rule, ...] = (
        numbers.impossible_size,
        *(off_card.RULES if is_off_card else ()),
        numbers.judge_refusal,
    )
    found = next((one for rule in rules if (one := rule(case.text)) is not None), None)
    if found is None:
        return None
    if found.code != "host-kill":
        found = replace(found, grade="certain", doubt="")
    elif found.grade == "possible":  # a signal names no sender, but it was not the card
        found = replace(found, grade="likely")
    host = case.record.host
    if host is None or not is_off_card:
        return found
    main_memory = case.says(
        "main memory had {host_free_bytes} free of {host_total_bytes}, and /dev/shm"
        " {shm_free_bytes} free of {shm_total_bytes}",
        host_free_bytes=host.free_bytes,
        host_total_bytes=host.total_bytes,
        shm_free_bytes=host.shm_free_bytes,
        shm_total_bytes=host.shm_total_bytes,
    )
    return insert_sentence(found, main_memory, at=len(found.evidence))


def judge_words(case: Case) -> tuple[Cause, ...]:
    """Return causes that a rule for texts shows, but no number of a record."""
    found = (each for each in by_words.causes_of(case.text) if each.grade != "possible")
    return tuple(each for each in found if each.code in _BY_WORDS_ALONE)


def _judge_moment(case: Case) -> Cause | None:
    moment, where = case.record.moment, f"it happened in {case.record.where}"
    if moment == "resume":
        asked = "the request was {requested_bytes}, with {allocated_bytes} in tensors"
        return cause("resume-load", f"{where}, before training went on", case.says(asked))
    if moment == "save":
        return cause(
            "save-gather", case.says("it happened in {where}; the request was {requested_bytes}")
        )
    if moment == "generate":
        kept = "it happened in {where}; training keeps {kept_by_training_bytes} on the card"
        return cause("generate-cache", case.says(kept))
    if moment == "begin" and case.record.call == "train":
        held = "no step had begun; tensors held {allocated_bytes} of {capacity_bytes}"
        return cause("load-too-large", case.says(held), grade="likely")
    return None


def _evaluation(case: Case) -> Cause | None:
    record = case.record
    if record.moment not in ("eval", "predict"):
        return None
    if any("self.compute_metrics(" in frame.code for frame in record.frames):
        *_, last = record.frames
        return cause(
            "eval-metrics",
            case.says(
                "the request was {requested_bytes}, in {place}",
                place=f"{last.function} ({last.file}, line {last.line})",
            ),
        )
    kept = case.kept_logits_bytes
    is_collecting = case.text.find_call(place.COLLECTING, innermost=10)
    if kept or is_collecting:
        return cause(
            "eval-logits",
            case.says("outputs of earlier batches held {kept_bytes}", kept_bytes=kept)
            if kept
            else "",
            f"it was collecting them in {record.where}" if is_collecting else "",
            kept_bytes=kept,
        )
    rows = case.argument("per_device_eval_batch_size", 8)
    return cause(
        "eval-batch",
        case.says(
            f"it happened in {{where}}, with {{num_eval_rows}} rows{_SHAPE if case.tokens else ''}",
            num_eval_rows=rows,
        ),
        case.says("training keeps {kept_by_training_bytes} on the card meanwhile"),
        num_rows=rows,
    )


def _leak(case: Case) -> Cause | None:
    steps = case.live_after_steps
    if len(steps) < _FEWEST_STEPS:
        return None
    rising = [after[1] > before[1] for before, after in pairwise(steps)]
    if sum(rising) < 0.8 * len(rising) or case.risen_bytes < 0.1 * case.total_bytes:
        return None
    a_step = case.risen_bytes / max(1, steps[-1][0] - steps[0][0])
    remarks = (each.finding for each in reversed(case.entries) if isinstance(each, Remark))
    noted = next((each for each in remarks if each.code == "leak-tensors"), None)
    return cause(
        "leak",
        case.says(
            "{bytes_a_step} more after each step, {risen_bytes} from step {first_step} to"
            " {last_step}",
            bytes_a_step=int(a_step),
            risen_bytes=case.risen_bytes,
            first_step=steps[0][0],
            last_step=steps[-1][0],
        ),
        *([f"MemoryWatchdog noted {noted.evidence}. {noted.remedy}"] if noted else []),
        *(f"{what} held by {holder}" for what, holder in case.kept_tensors[:2]),
        summary=f"live memory has risen from step to step since step {steps[0][0]}: something keeps"
        " tensors",
        grade="certain" if noted else "likely",
    )


def _optimizer(case: Case) -> Cause | None:
    if case.record.part != "optimizer":
        return None
    is_temporary = case.text.find_call("multi_tensor") is not None
    return cause(
        "optimizer-state",
        "it was the first step of the run, which creates the states"
        if case.is_first_step
        else f"it happened in {case.record.where}",
        case.says(
            "parameters held {parameter_bytes}, gradients {gradient_bytes}, states {states_bytes}",
            parameter_bytes=case.category("parameter"),
            gradient_bytes=case.category("gradient"),
            states_bytes=case.category("optimizer"),
        ),
        summary="the optimizer's temporaries, as large as the weights, do not fit"
        if is_temporary
        else "the optimizer states do not fit",
    )


def _zero3(case: Case) -> Cause | None:
    if not case.text.find_call(_ZERO3) or case.record.part == "optimizer":
        return None
    return cause(
        "zero3-gather",
        case.says("it happened in {where}; the request was {requested_bytes}"),
        grade="likely",
    )


def _fragmentation(case: Case) -> Cause | None:
    if not is_in_pieces(case.asked_bytes, case.unused_bytes, case.free_bytes, case.total_bytes):
        return None
    fitted_before = case.live_bytes + case.asked_bytes <= case.highest_peak_bytes
    # If no earlier step was as large, a little fragmentation may be chance.
    is_much = case.unused_bytes >= 0.1 * case.total_bytes
    return cause(
        "fragmentation",
        case.says(
            "{requested_bytes} were asked for in one piece; {unused_bytes} lay unused in the"
            " allocator's segments, and {free_bytes} were free"
        ),
        case.says("earlier steps needed as much, {highest_peak_bytes}") if fitted_before else "",
        grade="certain" if fitted_before else "likely" if is_much else "possible",
        doubt="" if fitted_before else "whether the rest of the step would have fitted",
        highest_peak_bytes=case.highest_peak_bytes,
    )


def _logits(case: Case) -> Cause | None:
    vocabulary, tokens = case.config("vocab_size"), case.tokens
    if not vocabulary or tokens is None:
        return None
    rows, length = tokens
    is_exact = any(
        match_tokens(case.asked_bytes, vocabulary * width, rows, length) for width in (2, 4)
    )
    num_bytes = rows * length * vocabulary * 4
    room = case.record.error.limit_bytes or case.total_bytes
    is_shown = is_exact or case.text.find_call(place.LOGITS, innermost=4)
    if num_bytes < 0.1 * room or not is_shown:
        return None
    return cause(
        "logits-loss",
        case.says(
            "{requested_bytes} were asked for; logits of {num_rows} rows of {num_tokens} tokens"
            " over {num_words:,} words are {logits_bytes} in fp32",
            num_words=vocabulary,
            logits_bytes=num_bytes,
        ),
        grade="certain" if is_exact else "likely",
    )


def _quadratic(case: Case) -> Cause | None:
    heads, tokens = case.config("num_attention_heads"), case.tokens
    if not heads or tokens is None:
        return None
    rows, length = tokens
    table = rows * heads * length * length
    # For short rows, tables match the size of anything.
    if length < 512 or not any(is_size_of(case.asked_bytes, table * width) for width in (2, 4)):
        return None
    return cause(
        "quadratic-attention",
        case.says(
            "{requested_bytes} were asked for: {num_rows} rows x {num_heads} heads x {num_tokens}"
            " x {length}",
            num_heads=heads,
            length=str(length),
        ),
    )


def _long_sample(case: Case) -> Cause | None:
    needed = case.live_bytes + case.asked_bytes
    is_step = case.record.moment == "train" and case.record.part in ("forward", "backward")
    if not is_step or len(case.samples) <= WARM_UP_STEPS or needed < 1.1 * case.highest_peak_bytes:
        return None
    return cause(
        "long-sample",
        case.says(
            "{num_earlier_steps} steps before it needed at most {highest_peak_bytes}; this one at"
            f" least {{needed_bytes}}{_SHAPE if case.tokens else ''}",
            needed_bytes=needed,
        ),
        "memory kept from step to step has not grown",
        summary="this batch needed more memory than any before it: a long sample, or many at once",
        grade="likely",
    )


def _capacity(case: Case) -> Cause:
    is_counted, limit = case.record.alive is not None, case.record.error.limit_bytes
    return cause(
        "capacity",
        case.says("this process may use only {limit_bytes} of {capacity_bytes}") if limit else "",
        case.says(
            "{where} asked for {requested_bytes} more; tensors held {allocated_bytes} of"
            " {capacity_bytes}, and {free_bytes} were free"
        ),
        case.says(
            "{kept_by_training_bytes} are weights, gradients and states, {of_the_batch_bytes} the"
            f" batch{_SHAPE if case.tokens else ''}"
        )
        if is_counted
        else "",
        case.says("not fragmentation: {unused_bytes} unused")
        if case.unused_bytes < FRAGMENTED_FRACTION * case.total_bytes
        else "",
        grade="likely" if is_counted else "possible",
        doubt="" if is_counted else "live tensors could not be counted",
        kept_by_training_bytes=case.fixed_bytes,
        of_the_batch_bytes=case.live_bytes - case.fixed_bytes,
    )


def _other_processes(case: Case) -> Cause | None:
    foreign, limit = case.foreign_bytes, case.record.error.limit_bytes
    if limit is not None and case.free_bytes >= case.asked_bytes:
        return None  # the card itself was not full
    is_little = foreign < max(1, 0.1 * case.total_bytes)
    if is_little or case.asked_bytes > case.free_bytes + foreign:
        return None
    listed = [each for each in case.record.processes or () if not each.is_own]
    names = [f"pid {each.pid} ({each.name or 'name unknown'})" for each in listed]
    is_engine = any(re.search(others.ENGINE, name) for name in names)
    own = sum(each.used_bytes or 0 for each in case.record.processes or () if each.is_own)
    sizes = [each.used_bytes or 0 for each in listed]
    are_ranks = case.record.run.world_size > 1 and not is_engine and are_alike(own, sizes)
    return cause(
        "engine-share" if is_engine else "ddp-gpu0" if are_ranks else "foreign",
        case.says(
            "of {capacity_bytes}, {foreign_bytes} are others', {allocated_bytes} were in tensors of"
            " this run and {free_bytes} free",
        ),
        ", ".join(names),
        case.says("without it the refused {requested_bytes} would have fitted"),
        grade="certain" if listed and case.record.run.world_size == 1 else "likely",
    )


def _leftover(case: Case) -> Cause | None:
    """Find copies of the run's own model that are still alive."""
    others = case.second_models
    models = (each for each in case.alive.models if each.name == case.record.run.model)
    copies = [each for each in models if each not in others]
    held = sum(each.num_bytes for each in copies[1:])
    if len(copies) < 2 or held < 0.1 * case.total_bytes:
        return None
    return cause(
        "leftover",
        case.says(
            "the others take {held_bytes} in addition to the {largest_model_bytes} of the largest",
            held_bytes=held,
            largest_model_bytes=copies[0].num_bytes,
        ),
        summary=f"{len(copies)} models of the class {copies[0].name} are on the card: an earlier"
        " run, or a second copy, is still held",
        num_models=len(copies),
    )


def _second_model(case: Case) -> Cause | None:
    models = case.second_models
    held = sum(each.num_bytes for each in models)
    if not models or held < 0.1 * case.total_bytes:
        return None
    largest = models[0]
    return cause(
        "second-copy",
        case.says(
            "{held_bytes} of {capacity_bytes} are the weights of {name} ({place})",
            held_bytes=held,
            name=largest.name,
            place=largest.place,
        ),
        grade="likely",
    )


RULES: tuple[Callable[[Case], Cause | None], ...] = (
    _judge_error,
    _other_processes,
    _leftover,
    _judge_moment,
    _evaluation,
    _leak,
    _optimizer,
    _zero3,
    _fragmentation,
    _quadratic,
    _logits,
    _long_sample,
    _second_model,
)  # the first match leads; the others follow as also possible
