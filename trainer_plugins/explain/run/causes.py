"""Causes of a recorded out-of-memory error: what text alone cannot know is known here."""

from collections.abc import Callable
from itertools import pairwise

from trainer_plugins.explain.answer import Cause, Certainty
from trainer_plugins.explain.run.beside import leftover, other_memory, other_processes, second_model
from trainer_plugins.explain.run.case import WARM_UP_STEPS, Case
from trainer_plugins.explain.shared import (
    FRAGMENTED_FRACTION,
    cause,
    is_in_pieces,
    said,
)
from trainer_plugins.record.timeline import Remark
from trainer_plugins.snapshot.owners import IMPOSSIBLE_BYTES, is_refused_though_free
from trainer_plugins.units import size

_FEWEST_STEPS = 5
_SHAPE = " ({num_rows} x {num_tokens} tokens)"

_KEPT_LOGITS = {
    "nested_concat", "nested_gather", "nested_numpify", "nested_detach", "pad_across_processes",
    "torch_pad_and_concatenate", "gather_for_metrics", "gather_function", "to_cpu_and_numpy",
}  # fmt: skip
_LOSS = {"cross_entropy", "log_softmax", "nll_loss", "ForCausalLMLoss", "fixed_cross_entropy"}
_ZERO3 = {"all_gather_params", "all_gather_coalesced", "fetch_sub_module"}


def causes_of(case: Case) -> tuple[Cause, ...]:
    """Return the causes that the record shows, the one that decides first; at least one."""
    found = [one for rule in RULES if (one := rule(case)) is not None] or [_capacity(case)]
    if _has_pieces(case) and all(each.code != "fragmentation" for each in found):
        found.append(_in_pieces(case, "possible"))
    return tuple(found)


def _impossible(case: Case) -> Cause | None:
    asked = said("{requested_bytes} were asked for in one piece", **case.stated)
    return cause("impossible-size", asked) if case.asked > IMPOSSIBLE_BYTES else None


def _contradictory(case: Case) -> Cause | None:
    # A limit of its own is one: `set_per_process_memory_fraction`, which `Headroom` sets.
    if not case.asked or case.record.error.limit_bytes is not None:
        return None
    if not is_refused_though_free(case.asked, case.free, 0.05 * case.asked):
        return None
    return cause(
        "contradictory",
        said(
            "{requested_bytes} were refused with {free_bytes} free of {capacity_bytes}",
            **case.stated,
        ),
    )


def _by_moment(case: Case) -> Cause | None:
    moment, where = case.record.moment, f"it happened in {case.record.where}"
    if moment == "resume":
        asked = "{requested_bytes} were asked for, with {allocated_bytes} in tensors"
        return cause("resume-load", f"{where}, before training went on", said(asked, **case.stated))
    if moment == "save":
        asked = "{where}; {requested_bytes} were asked for"
        return cause("save-gather", said(asked, where=where, **case.stated))
    if moment == "generate":
        kept = "{where}; training keeps {kept_by_training_bytes} on the card"
        numbers = {"kept_by_training_bytes": case.fixed}
        return cause("generate-cache", said(kept, where=where, **numbers))
    if moment == "begin" and case.record.call == "train":
        return cause(
            "load-too-large",
            said(
                "no step had begun; {allocated_bytes} of {capacity_bytes} were in tensors",
                **case.stated,
            ),
            grade="likely",
        )
    return None


def _evaluation(case: Case) -> Cause | None:
    record = case.record
    if record.moment not in ("eval", "predict"):
        return None
    if any("self.compute_metrics(" in frame.code for frame in record.frames):
        *_, last = record.frames
        return cause(
            "eval-metrics",
            said(
                "{requested_bytes} were asked for in {place}",
                place=f"{last.function} ({last.file}, line {last.line})",
                **case.stated,
            ),
        )
    kept, is_collecting = kept_logits(case), bool(case.functions & _KEPT_LOGITS)
    if kept or is_collecting:
        return cause(
            "eval-logits",
            said("{kept_bytes} of earlier batches were alive", kept_bytes=kept) if kept else "",
            f"it was collecting them in {record.where}" if is_collecting else "",
            kept_bytes=kept,
        )
    rows = case.argument("per_device_eval_batch_size", 8)
    return cause(
        "eval-batch",
        said(
            f"it happened in {{where}}, with {{num_eval_rows}} rows{_SHAPE if case.tokens else ''}",
            where=record.where,
            num_eval_rows=rows,
            **case.shape,
        ),
        said(
            "training keeps {kept_by_training_bytes} on the card meanwhile",
            kept_by_training_bytes=case.fixed,
        ),
        num_rows=rows,
    )


def kept_logits(case: Case) -> int:
    """Return the bytes of outputs that an evaluation keeps; 0 if they are few."""
    vocabulary = case.config("vocab_size")
    tensors = case.record.alive.largest if case.record.alive else ()
    kept = sum(
        each.num_bytes
        for each in tensors
        if "EvalLoopContainer" in each.holder
        or (vocabulary and each.shape[-1:] == (vocabulary,) and len(each.shape) == 3)
    )
    return kept if kept > 0.1 * case.live else 0


def _leak(case: Case) -> Cause | None:
    steps = case.live_after_steps
    if len(steps) < _FEWEST_STEPS:
        return None
    rising = [after[1] > before[1] for before, after in pairwise(steps)]
    risen = steps[-1][1] - steps[0][1]
    if sum(rising) < 0.8 * len(rising) or risen < 0.1 * case.total:
        return None
    a_step = risen / max(1, steps[-1][0] - steps[0][0])
    remarks = (each.finding for each in reversed(case.entries) if isinstance(each, Remark))
    noted = next((each for each in remarks if each.code == "leak-tensors"), None)
    return cause(
        "leak",
        said(
            "{bytes_a_step} more after each step, {risen_bytes} from step {first_step} to"
            " {last_step}",
            bytes_a_step=int(a_step),
            risen_bytes=risen,
            first_step=steps[0][0],
            last_step=steps[-1][0],
        ),
        *([f"MemoryWatchdog noted {noted.evidence}. {noted.remedy}"] if noted else []),
        *(f"{what} held by {holder}" for what, holder in kept_in(case)[:2]),
        summary=f"live memory has risen from step to step since step {steps[0][0]}: something is"
        " kept",
        grade="certain" if noted else "likely",
    )


def kept_in(case: Case) -> list[tuple[str, str]]:
    """Return what is kept that belongs to no model, and what holds it; the larger kind first."""
    alive = case.record.alive
    if alive is None:
        return []
    tensors = [
        (f"{size(each.num_bytes)} {list(each.shape)}", each.holder) for each in alive.largest
    ]
    graphs = [(f"a graph that ends in {list(each.shape)}", each.holder) for each in alive.graphs]
    of_graphs = alive.hidden_bytes + case.category("activation")
    return graphs + tensors if of_graphs > case.category("other") else tensors + graphs


def _optimizer(case: Case) -> Cause | None:
    if case.record.part != "optimizer":
        return None
    is_temporary = any("multi_tensor" in name for name in case.functions)
    return cause(
        "optimizer-state",
        "it was the first step of the run, in which the states are made"
        if case.is_first_step
        else f"it happened in {case.record.where}",
        said(
            "{parameter_bytes} of parameters, {gradient_bytes} of gradients, {states_bytes} of"
            " states were there",
            parameter_bytes=case.category("parameter"),
            gradient_bytes=case.category("gradient"),
            states_bytes=case.category("optimizer"),
        ),
        summary="the optimizer's temporaries, as large as the weights, do not fit"
        if is_temporary
        else "the optimizer's states do not fit",
    )


def _zero3(case: Case) -> Cause | None:
    if not case.functions & _ZERO3 or case.record.part == "optimizer":
        return None
    return cause(
        "zero3-gather",
        said(
            "it happened in {where}; {requested_bytes} were asked for",
            where=case.record.where,
            **case.stated,
        ),
        grade="likely",
    )


def _fragmentation(case: Case) -> Cause | None:
    if not _has_pieces(case):
        return None
    fitted_before = case.live + case.asked <= case.highest_peak
    # Where no step was as large before, little of the card in pieces may be chance.
    if not fitted_before and case.unused < 0.1 * case.total:
        return None
    return _in_pieces(case, "certain" if fitted_before else "likely")


def _has_pieces(case: Case) -> bool:
    return is_in_pieces(case.asked, case.unused, case.free, case.total)


def _in_pieces(case: Case, grade: Certainty) -> Cause:
    is_certain, highest = grade == "certain", case.highest_peak
    return cause(
        "fragmentation",
        said(
            "{requested_bytes} were asked for in one piece; {unused_bytes} lay unused in the"
            " allocator's segments, and {free_bytes} were free",
            **case.stated,
        ),
        said("earlier steps needed as much, {highest_peak_bytes}", highest_peak_bytes=highest)
        if is_certain
        else "",
        grade=grade,
        doubt="" if is_certain else "whether the rest of the step would have fitted",
        highest_peak_bytes=highest,
    )


def _logits(case: Case) -> Cause | None:
    vocabulary, tokens = case.config("vocab_size"), case.tokens
    if not vocabulary or tokens is None:
        return None
    rows, length = tokens
    is_exact = any(
        case.is_size_of(rows * seen * vocabulary * width)
        for seen in (length, length - 1)
        for width in (2, 4)
    )
    num_bytes = rows * length * vocabulary * 4
    room = case.record.error.limit_bytes or case.total
    if num_bytes < 0.1 * room or (not is_exact and not case.functions & _LOSS):
        return None
    return cause(
        "logits-loss",
        said(
            "{requested_bytes} were asked for; logits of {num_rows} rows of {num_tokens} tokens"
            " over {num_words:,} words are {logits_bytes} in fp32",
            num_words=vocabulary,
            logits_bytes=num_bytes,
            **case.shape,
            **case.stated,
        ),
        grade="certain" if is_exact else "likely",
    )


def _quadratic(case: Case) -> Cause | None:
    heads, tokens = case.config("num_attention_heads"), case.tokens
    if not heads or tokens is None:
        return None
    rows, length = tokens
    table = rows * heads * length * length
    # Short rows make tables of the size of anything.
    if length < 512 or not any(case.is_size_of(table * width) for width in (2, 4)):
        return None
    return cause(
        "quadratic-attention",
        said(
            "{requested_bytes} were asked for: {num_rows} rows x {num_heads} heads x {num_tokens}"
            " x {length}",
            num_heads=heads,
            length=str(length),
            **case.shape,
            **case.stated,
        ),
    )


def _long_sample(case: Case) -> Cause | None:
    needed, num_steps = case.live + case.asked, len(case.samples)
    is_step = case.record.moment == "train" and case.record.part in ("forward", "backward")
    if not is_step or num_steps <= WARM_UP_STEPS or needed < 1.1 * case.highest_peak:
        return None
    return cause(
        "long-sample",
        said(
            "{num_earlier_steps} steps before it needed at most {highest_peak_bytes}; this one at"
            f" least {{needed_bytes}}{_SHAPE if case.tokens else ''}",
            num_earlier_steps=num_steps,
            highest_peak_bytes=case.highest_peak,
            needed_bytes=needed,
            **case.shape,
        ),
        "what stays from step to step has not grown",
        summary="this batch needed more than any before it: a long sample, or many at once",
        grade="likely",
    )


def _capacity(case: Case) -> Cause:
    is_counted, limit = case.record.alive is not None, case.record.error.limit_bytes
    return cause(
        "capacity",
        said("this process may use only {limit_bytes} of {capacity_bytes}", **case.stated)
        if limit
        else "",
        said(
            "{requested_bytes} more were asked for in {where}; {allocated_bytes} of"
            " {capacity_bytes} were in tensors, {free_bytes} free",
            where=case.record.where,
            **case.stated,
        ),
        said(
            "{kept_by_training_bytes} are weights, gradients and states, {of_the_batch_bytes} the"
            f" batch{_SHAPE if case.tokens else ''}",
            kept_by_training_bytes=case.fixed,
            of_the_batch_bytes=case.live - case.fixed,
            **case.shape,
        )
        if is_counted
        else "",
        said("not fragmentation: {unused_bytes} unused", **case.stated)
        if case.unused < FRAGMENTED_FRACTION * case.total
        else "",
        grade="likely" if is_counted else "possible",
        doubt="" if is_counted else "what was alive could not be counted",
        kept_by_training_bytes=case.fixed,
        of_the_batch_bytes=case.live - case.fixed,
    )


RULES: tuple[Callable[[Case], Cause | None], ...] = (
    _impossible,
    other_memory,
    _contradictory,
    other_processes,
    leftover,
    _by_moment,
    _evaluation,
    _leak,
    _optimizer,
    _zero3,
    _fragmentation,
    _quadratic,
    _logits,
    _long_sample,
    second_model,
)  # the first that finds something leads; the others follow as also possible
