"""Fill in the facts of a recorded out-of-memory error."""

import re
from dataclasses import replace
from itertools import pairwise

from trainer_plugins.explain.answer import Cause
from trainer_plugins.explain.judges import OomFacts
from trainer_plugins.explain.run.case import WARM_UP_STEPS, Case
from trainer_plugins.explain.shared import are_alike, insert_sentence
from trainer_plugins.explain.text import causes as by_words
from trainer_plugins.explain.text.causes import numbers, off_card, place
from trainer_plugins.explain.text.causes import others as by_others
from trainer_plugins.explain.text.solved import is_size_of, match_tokens
from trainer_plugins.explain.text.text_facts import Rule
from trainer_plugins.record.timeline import Remark

_FEWEST_STEPS = 5
_OFF_CARD = ("nccl", "pinned", "shared", "host")  # the sources of such an error
# Causes shown by words and frames, if no number of the record shows another.
_BY_WORDS_ALONE = ("api-misuse", "ddp-gpu0", "image-size", "mps-other")
_ZERO3 = "all_gather_params|all_gather_coalesced|fetch_sub_module"


def judge_words(case: Case) -> tuple[Cause, ...]:
    """Return causes that a rule for texts shows, but no number of a record."""
    found = (each for each in by_words.causes_of(case.text) if each.grade != "possible")
    return tuple(each for each in found if each.code in _BY_WORDS_ALONE)


def facts_of(case: Case) -> OomFacts:
    """Read the facts of a record, and of the steps before it."""
    tokens, frames = case.tokens or (None, None), case.record.frames
    facts = OomFacts(
        numbers=case.numbers,
        error=_judge_error(case),
        where=case.record.where,
        moment=_name_moment(case),
        part=_name_part(case),
        place="{0.function} ({0.file}, line {0.line})".format(frames[-1]) if frames else None,
        num_rows=tokens[0],
        num_tokens=tokens[1],
        num_eval_rows=case.argument("per_device_eval_batch_size", 8),
        num_earlier_steps=len(case.samples),
        highest_peak_bytes=case.highest_peak_bytes or None,
    )
    for read in (_read_tensors, _read_others, _read_steps, _read_shapes):
        facts = read(facts, case)
    return facts


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
    main_memory = case.text.states(
        "main memory had {host_free_bytes} free of {host_total_bytes}, and /dev/shm"
        " {shm_free_bytes} free of {shm_total_bytes}",
        host_free_bytes=host.free_bytes,
        host_total_bytes=host.total_bytes,
        shm_free_bytes=host.shm_free_bytes,
        shm_total_bytes=host.shm_total_bytes,
    )
    return insert_sentence(found, main_memory, at=len(found.evidence))


def _name_moment(case: Case) -> str:
    record = case.record
    if record.moment in ("resume", "save", "generate"):
        return record.moment
    if record.moment == "begin" and record.call == "train":
        return "load"
    if record.moment not in ("eval", "predict"):
        return ""
    if any("self.compute_metrics(" in frame.code for frame in record.frames):
        return "metrics"
    is_joining = case.kept_logits_bytes or case.text.find_call(place.COLLECTING, innermost=10)
    return "outputs" if is_joining else "evaluation"


def _name_part(case: Case) -> str:
    if case.record.part != "optimizer":
        return "gather" if case.text.find_call(_ZERO3) else ""
    if case.text.find_call("multi_tensor"):
        return "temporaries"
    return "states" if case.is_first_step else "optimizer"


def _read_tensors(facts: OomFacts, case: Case) -> OomFacts:
    if case.record.alive is None:
        return facts
    second = case.second_models
    models = (each for each in case.alive.models if each.name == case.record.run.model)
    copies = [each for each in models if each not in second]
    return replace(
        facts,
        parameter_bytes=case.category("parameter"),
        gradient_bytes=case.category("gradient"),
        states_bytes=case.category("optimizer"),
        kept_by_training_bytes=case.fixed_bytes,
        of_the_batch_bytes=case.live_bytes - case.fixed_bytes,
        kept_bytes=case.kept_logits_bytes or None,
        holders="; ".join(f"{what} held by {holder}" for what, holder in case.kept_tensors[:2]),
        num_models=len(copies),
        copies_bytes=sum(each.num_bytes for each in copies[1:]),
        largest_model_bytes=copies[0].num_bytes if copies else None,
        model=case.record.run.model,
        second_bytes=sum(each.num_bytes for each in second),
        second_model=f"{second[0].name} ({second[0].place})" if second else "",
    )


def _read_others(facts: OomFacts, case: Case) -> OomFacts:
    foreign, limit = case.foreign_bytes, case.record.error.limit_bytes
    if limit is not None and case.free_bytes >= case.asked_bytes:
        return facts  # the card itself was not full
    is_little = foreign < max(1, 0.1 * case.total_bytes)
    if is_little or case.asked_bytes > case.free_bytes + foreign:
        return facts
    world_size = case.record.run.world_size
    listed = [each for each in case.record.processes or () if not each.is_own]
    names = [f"pid {each.pid} ({each.name or 'name unknown'})" for each in listed]
    is_engine = any(re.search(by_others.ENGINE, name) for name in names)
    own = sum(each.used_bytes or 0 for each in case.record.processes or () if each.is_own)
    are_ranks = world_size > 1 and are_alike(own, [each.used_bytes or 0 for each in listed])
    return replace(
        facts,
        others="engine-share" if is_engine else "ddp-gpu0" if are_ranks else "foreign",
        neighbours=", ".join(names),
        foreign_bytes=foreign,
        is_listed=bool(listed) and world_size == 1,
    )


def _read_steps(facts: OomFacts, case: Case) -> OomFacts:
    steps, record = case.live_after_steps, case.record
    rising = [after[1] > before[1] for before, after in pairwise(steps)]
    rises = len(steps) >= _FEWEST_STEPS and sum(rising) >= 0.8 * len(rising)
    if rises and case.risen_bytes >= 0.1 * case.total_bytes:
        remarks = (each.finding for each in reversed(case.entries) if isinstance(each, Remark))
        noted = next((each for each in remarks if each.code == "leak-tensors"), None)
        facts = replace(
            facts,
            first_step=steps[0][0],
            last_step=steps[-1][0],
            risen_bytes=case.risen_bytes,
            bytes_a_step=int(case.risen_bytes / max(1, steps[-1][0] - steps[0][0])),
            noted=f"MemoryWatchdog noted {noted.evidence}. {noted.remedy}" if noted else "",
        )
    needed = case.live_bytes + case.asked_bytes
    is_step = record.moment == "train" and record.part in ("forward", "backward")
    if is_step and len(case.samples) > WARM_UP_STEPS and needed >= 1.1 * case.highest_peak_bytes:
        facts = replace(facts, needed_bytes=needed)
    return facts


def _read_shapes(facts: OomFacts, case: Case) -> OomFacts:
    if case.tokens is None:
        return facts
    (rows, length), asked = case.tokens, case.asked_bytes
    heads, vocabulary = case.config("num_attention_heads"), case.config("vocab_size")
    table = rows * heads * length * length
    # For short rows, tables match the size of anything.
    if length >= 512 and any(is_size_of(asked, table * width) for width in (2, 4)):
        facts = replace(facts, num_heads=heads, length=str(length))
    is_exact = any(match_tokens(asked, vocabulary * width, rows, length) for width in (2, 4))
    num_bytes = rows * length * vocabulary * 4
    room = case.record.error.limit_bytes or case.total_bytes
    is_shown = is_exact or case.text.find_call(place.LOGITS, innermost=4)
    if vocabulary and is_shown and num_bytes >= 0.1 * room:
        facts = replace(facts, num_words=vocabulary, logits_bytes=num_bytes, is_of_logits=is_exact)
    return facts
