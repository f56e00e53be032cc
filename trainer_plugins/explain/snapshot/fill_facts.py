"""Fill in the facts that a snapshot shows."""

from collections import Counter
from dataclasses import replace

from trainer_plugins.explain.answer import Cause, Numbers
from trainer_plugins.explain.judges import OomFacts
from trainer_plugins.explain.shared import cause
from trainer_plugins.explain.snapshot.remedies import Tries, find_leaked_lives
from trainer_plugins.snapshot.held import WORDS
from trainer_plugins.snapshot.lives import BEFORE
from trainer_plugins.snapshot.oom import Oom, SnapshotCase, sum_reserved
from trainer_plugins.units import GIB, percent

_WORK = {
    "evaluation": "outputs",
    "gathering": "gather",
    "generation": "generate",
    "loss": "loss",
    "optimizer": "optimizer",
    "saving": "save",
}


def facts_of(case: SnapshotCase, oom: Oom, tries: Tries, stated: Numbers) -> OomFacts:
    """Read the facts of the last OOM of a snapshot."""
    held, now = case.held.categories, case.sorter.step_at(case.held.position)
    category, most = case.largest_category
    line = case.held.lines[0] if case.held.lines else ("", 0, 0)
    work, is_of_logits = case.request.work, held.get("logits", 0) >= 0.25 * case.in_use_bytes
    facts = OomFacts(
        numbers=replace(stated, capacity_bytes=case.capacity_bytes),
        error=_judge_request(oom),
        work="logits" if work != "loss" and is_of_logits else _WORK.get(work, ""),
        place=case.request.place,
        parameter_bytes=held.get("parameters", 0),
        gradient_bytes=held.get("gradients", 0),
        states_bytes=held.get("optimizer states", 0),
        gathered_bytes=held.get("gathered parameters"),
        logits_bytes=held.get("logits"),
        category=f"{percent(most / max(case.in_use_bytes, 1))} of it is {WORDS[category]}",
        largest_line=line[0],
        most_bytes=line[1],
        num_earlier_steps=now,
        largest_category=category,
        largest_category_bytes=most,
        in_use_bytes=case.in_use_bytes,
        missing_bytes=case.missing_bytes,
        setting_that_helps=tries.setting_that_helps or None,
        why_none_helps=tries.why_none_helps,
    )
    return _read_leak(_read_limit(_read_same_line(facts, case, oom, now), case), case)


def _judge_request(oom: Oom) -> Cause | None:
    if oom.is_impossible:
        return cause("impossible-size")
    if oom.is_contradictory:
        doubt = (
            "A limit below the card's size refused it: look for set_per_process_memory_fraction,"
            " and for limits of WSL, a container or a MIG slice"
        )
        return cause("contradictory", doubt=doubt)
    return None


def _read_limit(facts: OomFacts, case: SnapshotCase) -> OomFacts:
    """Compare the process's limit at the first and at the last OOM: others hold the difference."""
    reserved = sum_reserved(case.card)
    ends = [
        reserved[at + 1] + event.address
        for at, event in enumerate(case.card.events)
        if event.action == "oom"
    ]
    if max(ends) - ends[-1] <= max(2 * GIB, 0.15 * max(ends)):
        return facts
    return replace(
        facts,
        others="foreign",
        earlier_bytes=max(ends),
        last_bytes=ends[-1],
        lost_bytes=max(ends) - ends[-1],
    )


def _read_leak(facts: OomFacts, case: SnapshotCase) -> OomFacts:
    leaked = find_leaked_lives(case)
    if not leaked:
        return facts
    bytes_at: Counter[str] = Counter()
    for life in leaked:
        bytes_at[case.sorter.place(life)] += life.num_bytes
    [(place, most)] = bytes_at.most_common(1)
    return replace(
        facts,
        leaked_bytes=bytes_at.total(),
        num_steps=len({case.sorter.step_at(life.birth) for life in leaked}),
        most_bytes=most,
        leaks_from=place,
    )


def _read_same_line(facts: OomFacts, case: SnapshotCase, oom: Oom, now: int) -> OomFacts:
    """Compare the request with those of the same stack in earlier steps."""
    before = [
        life.requested_bytes
        for life in case.sorter.lives
        if life.stack
        and life.stack == case.oom_stack
        and life.birth != BEFORE
        and case.sorter.step_at(life.birth) < now
    ]
    if now < 2 or len(before) < 2 or oom.num_bytes <= 1.25 * max(before):
        return facts
    times = f"{oom.num_bytes / max(before):.1f}"
    return replace(facts, earlier_request_bytes=max(before), times=times)
