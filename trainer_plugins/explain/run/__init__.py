"""Explain why the last run of a folder ran out of memory, from the files it wrote.

The causes are judged in `trainer_plugins/explain/judges.py`, by the facts that
`trainer_plugins/explain/run/fill_facts.py` reads; the numbers of remedies are computed in
`trainer_plugins/explain/run/remedies.py`.
"""

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from trainer_plugins import advice
from trainer_plugins.advice import Door
from trainer_plugins.explain.answer import Cause, Explanation, Numbers, Remedy
from trainer_plugins.explain.judges import causes_of
from trainer_plugins.explain.run.case import Case
from trainer_plugins.explain.run.ending import judge_ending
from trainer_plugins.explain.run.fill_facts import facts_of, judge_words
from trainer_plugins.explain.run.remedies import less_main_memory, remedies_of
from trainer_plugins.explain.shared import add_numbers, cause, remedy, say
from trainer_plugins.explain.text import remedies as of_text
from trainer_plugins.explain.text.causes.off_card import WORKER_KILLED
from trainer_plugins.finding import Finding
from trainer_plugins.printable import printable
from trainer_plugins.record.history import History, Run, entries_of, missing_in_words, read_history
from trainer_plugins.record.oom_record import (
    OomRecord,
    Planned,
    read_oom_records,
    refuse_damaged_records,
)
from trainer_plugins.record.run_facts import RunFacts, read_run_facts
from trainer_plugins.record.timeline import Entry, Failure, Remark
from trainer_plugins.units import size

_SLACK_SECONDS = 1.0  # between the clocks and start times of one run's ranks
_SHOWN_FRACTION = 0.01
_DEAD_WORKER = re.compile(r"DataLoader worker.*(?:killed by signal|exited unexpectedly)")


def explain_run(folder: Path, predicts: bool = False) -> Explanation:
    """Explain the last run of a folder, or raise ValueError if no run wrote into it."""
    records, facts, history = read_oom_records(folder), read_run_facts(folder), _history(folder)
    if not records:
        with suppress(OSError):  # a FIFO
            refuse_damaged_records(folder)
    if not records and not facts and history is None:
        raise ValueError(
            f"{printable(folder)} has no readable run.json, oom-rank*.json or"
            " memory/rank-*.jsonl: give the output_dir of a run that had OOMReporter"
        )
    last_seconds = records[-1].time_seconds if records else float("inf")
    begun_later = [each for each in facts if each.time_seconds > last_seconds]
    if not records or begun_later:
        found = _explain_unrecorded(folder, history, facts)
        if found is not None:
            return found
    if not records:
        nothing = ("no run in this folder has recorded an OOM",)
        return Explanation(subject=printable(folder), facts=nothing)
    return _explain(folder, _select_run(records[-1], records), history, begun_later, predicts)


def explain_record(record: OomRecord, folder: Path, predicts: bool = False) -> Explanation:
    """Explain the run of a record, which need not be the last one of its output_dir."""
    records = _select_run(record, [*read_oom_records(folder), record])
    return _explain(folder, records, _history(folder), (), predicts)


def _history(folder: Path) -> History | None:
    try:
        return read_history(folder)
    except ValueError:
        return None


def _select_run(one: OomRecord, records: Sequence[OomRecord]) -> list[OomRecord]:
    """Return the records of all ranks of a record's run, the first death first."""
    began = one.run.time_seconds
    of_run = [each for each in records if abs(each.run.time_seconds - began) <= _SLACK_SECONDS]
    last = {each.rank: each for each in of_run}
    return sorted(last.values(), key=lambda each: each.time_seconds)


def _explain(
    folder: Path,
    records: Sequence[OomRecord],
    history: History | None,
    begun_later: Sequence[RunFacts],
    predicts: bool,
) -> Explanation:
    first = records[0]
    case = Case(first, _entries(history, first))
    causes = causes_of(facts_of(case))
    by_words = judge_words(case) if causes[0].code == "capacity" else ()
    causes = (*by_words, *causes)
    helps = (*of_text.remedies_of(by_words, case.text), *remedies_of(causes, case))
    remedies = {each.do: each for each in helps}
    later = [f"{len(begun_later)} later run(s) in this folder left no such record"]
    found = Explanation(
        subject=printable(folder),
        causes=add_numbers(causes, case.numbers, case.find_source),
        remedies=tuple(remedies.values()),
        facts=(*_facts(case), *_ranks(records, history), *(later if begun_later else ())),
        unknown=_unknown(case),
        numbers=case.numbers,
    )
    if predicts:
        from trainer_plugins.explain.run.predicted import predict_remedies

        found = predict_remedies(found, case)
    return replace(
        found, remedies=tuple(_write_as_typed(each, first.run) for each in found.remedies)
    )


def _write_as_typed(remedy: Remedy, run: RunFacts) -> Remedy:
    """Write flags and the preset as overrides, if Hydra made the run."""
    if not run.override:
        return remedy
    if remedy.do.startswith(advice.SURVIVE.shell.partition(" -- ")[0]):
        return replace(remedy, do=advice.SURVIVE.flag(Door.HYDRA))
    if not remedy.flags or not remedy.flags.keys() <= run.arguments.keys():
        return remedy
    overrides = (f"{run.override}{name}={value}" for name, value in remedy.flags.items())
    return replace(remedy, do=" ".join(overrides))


def _entries(history: History | None, record: OomRecord) -> Sequence[Entry]:
    """Return this rank's timeline in the run of a record, up to the record."""
    for run in reversed(history.runs if history else ()):
        entries = run.timelines.get(record.rank, ())
        if entries and entries[0].time_seconds <= record.time_seconds + _SLACK_SECONDS:
            return entries
    return ()


def _facts(case: Case) -> tuple[str, ...]:
    record, run = case.record, case.record.run
    host = f", on {run.place.host}" if run.place is not None and run.place.host else ""
    found = [
        f"rank {record.rank} of {run.world_size} ran out of memory in {record.where}, in"
        f" {record.call}(): {record.error_class}{host}"
    ]
    if case.total_bytes:
        found.append(
            f"{run.card or run.device}: {size(case.total_bytes)}, of which {size(case.live_bytes)}"
            f" in tensors, {size(case.unused_bytes)} unused by the allocator,"
            f" {size(case.free_bytes)} free; the request was {size(case.asked_bytes)}"
        )
    if record.alive is not None:
        parts = sorted(record.alive.category_bytes.items(), key=lambda pair: -pair[1])
        shown = ", ".join(f"{name} {size(num_bytes)}" for name, num_bytes in parts)
        found.append(f"alive: {shown}, saved by autograd {size(record.alive.hidden_bytes)}")
        found += [
            f"held: {size(each.num_bytes)} {list(each.shape)} by {each.holder}"
            for each in record.alive.largest
            if each.num_bytes >= _SHOWN_FRACTION * case.live_bytes
        ]
    if record.batch:
        shapes = ", ".join(f"{name} {list(each.shape)}" for name, each in record.batch.items())
        found.append(f"batch: {shapes}")
    if run.strategy is not None:
        found.append(f"runs as {run.strategy}")
    if run.launch is not None and run.launch.file:
        found.append(f"it was launched with {run.launch.file}")
    if record.plan is not None:
        found.append(_describe_plan(record.plan))
    notes = {each.finding.code: each for each in case.entries if isinstance(each, Remark)}
    found += [f"noted in step {each.step}: {each.finding}" for each in [*notes.values()][-3:]]
    return tuple(printable(each) for each in found)


def _describe_plan(plan: Planned) -> str:
    verdict = {True: "it fits", False: "does not fit", None: "no card was named"}[plan.fits]
    of_card = f" of {size(plan.capacity_bytes)}" if plan.capacity_bytes is not None else ""
    return (
        f"{plan.source} had predicted a peak of {size(plan.nvidia_smi_peak_bytes)}{of_card},"
        f" in {plan.moment}: {verdict}"
    )


def _ranks(records: Sequence[OomRecord], history: History | None) -> tuple[str, ...]:
    """Say which ranks failed too, and which only waited for those that were gone."""
    found = [
        f"rank {each.rank} ran out of memory {each.time_seconds - records[0].time_seconds:.1f} s"
        f" later, in {each.where}"
        for each in records[1:]
    ]
    failed = {each.rank for each in records}
    run = history.runs[-1] if history and history.runs else Run({})
    for rank, entries in run.timelines.items():
        if rank not in failed:
            last = entries[-1]
            words = f": {last.words}" if isinstance(last, Failure) else ""
            found.append(f"rank {rank} was only waiting, after step {last.step}{words}")
    if run.missing_ranks:
        found.append(missing_in_words(run))
    return tuple(printable(each) for each in found)


def _unknown(case: Case) -> tuple[str, ...]:
    missing = {
        "whether memory had risen before: no earlier step was recorded": not case.samples,
        "which tensors were alive: they could not be counted": case.record.alive is None,
        "which other processes used the card: the driver does not list them": case.record.processes
        is None,
    }
    return tuple(filter(missing.get, missing))


def _explain_unrecorded(
    folder: Path, history: History | None, facts: Sequence[RunFacts]
) -> Explanation | None:
    """Explain a run that was killed, or whose dataloader worker was; None if it was neither."""
    if history is None or not history.runs:
        return None
    failures = (failure for _, failure in entries_of(history.runs[-1].timelines, Failure))
    dead = next((each for each in failures if _DEAD_WORKER.search(each.words)), None)
    workers = facts[-1].arguments.get("dataloader_num_workers") if facts else 0
    if dead is not None:
        found = _judge_worker(dead, facts)
    elif (finding := judge_ending(history, folder)) is not None:
        if finding.code == "timeline-cut-off":
            return Explanation(subject=printable(folder), facts=(str(finding),))
        found = _judge_kill(finding)
    else:
        return None
    remedies = less_main_memory(found.code, workers if isinstance(workers, int) else 0)
    if found.grade == "possible":  # a signal whose sender is unknown
        place = facts[-1].place if facts else None
        is_slurm = place is not None and any("SLURM" in name for name in place.limits)
        asked = advice.ASK_SLURM if is_slurm else advice.FIND_THE_KILL
        remedies = tuple(
            replace(remedy(one), cause=found.code) for one in (asked, advice.RESUME_THE_RUN)
        )
    return Explanation(
        subject=printable(folder),
        causes=add_numbers([found], Numbers(), lambda _: "main memory"),
        remedies=remedies,
        unknown=("how much memory the process held: a killed process writes no record",),
    )


def _judge_worker(failure: Failure, facts: Sequence[RunFacts]) -> Cause:
    """Judge a dead dataloader worker: a bus error points to /dev/shm, a kill to main memory."""
    words = f"step {failure.step}: {failure.words}"
    if "Bus error" in failure.words:
        return cause("shm", words)
    before = facts[-1].place.num_oom_kills if facts and facts[-1].place else failure.num_oom_kills
    num_kills = failure.num_oom_kills - before
    return cause(
        "host-kill",
        words,
        say(
            "the kernel killed {num_kills} process(es) of this container meanwhile, for lack"
            " of main memory",
            num_kills=num_kills,
        )
        if num_kills > 0
        else "",
        summary=WORKER_KILLED,
        doubt="" if num_kills > 0 else "dmesg shows whether the kernel did it",
    )


def _judge_kill(finding: Finding) -> Cause:
    is_counted = finding.code == "host-oom-kill"
    return cause(
        "host-kill",
        *finding.evidence.split("; "),
        summary=finding.summary,
        grade="likely" if is_counted else "possible",
        doubt="" if is_counted else finding.remedy.rstrip("."),
    )
