"""Judge whether the last run of a folder was killed, from the files it left."""

from datetime import datetime
from pathlib import Path

from trainer_plugins import advice
from trainer_plugins.advice import Door
from trainer_plugins.finding import Finding
from trainer_plugins.record.history import History, Run, first_that_ended
from trainer_plugins.record.run_facts import Place, RunFacts, read_run_facts
from trainer_plugins.record.timeline import Failure, Remark, Sample

# Findings that may have predicted a kill.
_SIGNS = ("host-memory-pressure", "host-oom-kill", "leak-host", "leak-workers")


def judge_ending(history: History, folder: Path) -> Finding | None:
    """Judge the last run of a folder; None if it recorded its end or an error, or still runs."""
    if not history.runs or not history.runs[-1].silent_ranks:
        return None
    # Only for such a run: this imports torch, which takes seconds.
    from trainer_plugins.launch.place import is_running, place

    last, here = history.runs[-1], place()
    began_seconds, ended_seconds = last.seconds
    known = [facts for facts in read_run_facts(folder) if facts.time_seconds <= ended_seconds]
    facts = known[-1] if known and known[-1].time_seconds > began_seconds - 60 else None
    if facts is not None and is_running(facts, here):
        return None
    silent = last.silent_ranks
    if history.cut_off >= {*silent}:
        return Finding.warning(
            code="timeline-cut-off",
            summary="how the run ended is unknown: the disk was too full for the last entries of"
            f" {_names(last, silent)}",
            evidence="; ".join(_evidence(last, silent)),
            remedy="Look at the end of its log, and free some space in output_dir before the next"
            " run.",
        )
    first = first_that_ended(folder, began_seconds) if len(silent) == len(last.timelines) else None
    return _cut_off(last, facts, here, silent if first not in silent else [first])


def _cut_off(run: Run, facts: RunFacts | None, here: Place, silent: list[int]) -> Finding:
    """Judge a run without an end; kills count only on its machine, boot and container."""
    evidence = _evidence(run, silent)
    if facts is not None and facts.place is not None and facts.place.kernel == here.kernel:
        num_kills = here.num_oom_kills - facts.place.num_oom_kills
        if num_kills > 0:
            evidence.append(
                f"oom_kill of the control group rose from {facts.place.num_oom_kills} to"
                f" {here.num_oom_kills} since the run began"
            )
            return Finding.error(
                code="host-oom-kill",
                summary="the run was killed, and the kernel has killed for lack of main memory"
                " since",
                evidence="; ".join(evidence),
                remedy="Raise the container's memory limit,"
                f" {advice.FEWER_WORKERS.flag(Door.ARGUMENTS)}, or offload less.",
                amount=float(num_kills),
            )
        evidence.append("its process is gone, and this container has no new oom_kill")
    is_part = len(silent) < len(run.timelines)
    who = _names(run, silent) if is_part else "the run"
    return Finding.warning(
        code="run-cut-off",
        summary=f"{who} ended without a word: killed by a signal (preemption, scancel, the kernel),"
        " or still running on another machine",
        evidence="; ".join(evidence),
        remedy="Look for its exit code where you launched it (143 is SIGTERM, 137 SIGKILL), and for"
        " preemption or oom-kill in the scheduler's record (sacct, kubectl describe pod) or dmesg.",
    )


def _names(run: Run, ranks: list[int]) -> str:
    hosts = ", ".join(dict.fromkeys(run.hosts[rank] for rank in ranks if rank in run.hosts))
    named = f"rank {', '.join(map(str, ranks))} of {len(run.timelines)}"
    return f"{named} (on {hosts})" if hosts else named


def _evidence(run: Run, silent: list[int]) -> list[str]:
    entries = [entry for rank in silent for entry in run.timelines[rank]]
    last = max(entries, key=lambda entry: entry.time_seconds)
    when = datetime.fromtimestamp(last.time_seconds).isoformat(" ", "seconds")
    moment = f" ({last.moment})" if isinstance(last, Sample) else ""
    failed, signs = [], set()
    for rank, of_rank in sorted(run.timelines.items()):
        for entry in of_rank:
            if isinstance(entry, Failure):
                failed.append(f"rank {rank} raised in step {entry.step}: {entry.words}")
            elif isinstance(entry, Remark) and entry.finding.code in _SIGNS:
                signs.add(f"step {entry.step}: {entry.finding.summary}")
    end = f"the last entry is of step {last.step}{moment}, {when}, without an end or an error"
    return [end, *failed, *sorted(signs)]
