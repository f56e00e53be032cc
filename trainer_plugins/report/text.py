"""Renders a memory report of the runs in a folder, as short tables for the terminal."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from shlex import quote

from rich.box import SIMPLE
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from trainer_plugins.finding import Finding, Severity
from trainer_plugins.printable import printable
from trainer_plugins.record.history import History, Run
from trainer_plugins.record.timeline import Beginning, Entry, Failure, Flush, Remark, Sample
from trainer_plugins.units import percent, size

_STYLES = {Severity.INFO: "cyan", Severity.WARNING: "yellow", Severity.ERROR: "red"}


def history_report(history: History, ending: Finding | None = None) -> RenderableType:
    """Render one block a run, the last one first, then what could not be read.

    Args:
        history: the runs.
        ending: how the last run ended, if it left no word of its own.
    """
    parts: list[RenderableType] = []
    num_runs = len(history.runs)
    if num_runs > 1:
        parts.append(Text(f"{num_runs} runs wrote into this folder; the last one comes first"))
    for number, run in reversed([*enumerate(history.runs, start=1)]):
        if num_runs > 1:
            parts.append(Text(f"\nRun {number} of {num_runs}: {when(run)}", style="bold"))
        if ending is not None and number == num_runs:
            parts.append(Text(str(ending), style=_STYLES[ending.severity]))
        parts += [*_failures(run, history), memory_report(run.timelines)]
    if not history.runs:
        parts.append(Text("The files have no entries"))
    parts += [
        Text(
            f"rank {rank}: skipped {num} {'line' if num == 1 else 'lines'}: cut off by a kill or a"
            " full disk, damaged, or of a later version"
        )
        for rank, num in history.num_passed_over.items()
        if num
    ]
    parts.append(Text("files: " + ", ".join(printable(path) for path in history.files.values())))
    return Group(*parts)


def memory_report(timelines: Mapping[int, Sequence[Entry]]) -> RenderableType:
    """Render the timelines of one run by rank: peak of each moment, releases, findings."""
    table = Table(title="Memory: the peak of each moment", title_justify="left", box=SIMPLE)
    for column in ("rank", "moment", "device"):
        table.add_column(column)
    for column in ("readings", "peak", "full", "total", "reserved"):
        table.add_column(column, justify="right")
    lines: list[Text] = []
    for rank, entries in sorted(timelines.items()):
        for moment, samples in _by_moment(entries).items():
            highest = max(
                (sample.reading for sample in samples), key=lambda reading: reading.pressure
            )
            table.add_row(
                str(rank),
                printable(moment),
                printable(highest.device),
                str(sum(sample.num_readings for sample in samples)),
                size(max(sample.reading.peak_allocated_bytes for sample in samples)),
                percent(highest.pressure),
                size(highest.total_bytes),
                size(max(sample.reading.reserved_bytes for sample in samples)),
            )
        lines += [_releases(rank, entries), *_findings(rank, entries)]
    return Group(*_strategies(timelines), table, *lines)


def when(run: Run) -> str:
    """Say which steps a run had, and when."""
    (first_step, last_step), (began, ended) = run.steps, run.seconds
    steps = (
        f"step {first_step}" if first_step == last_step else f"steps {first_step} to {last_step}"
    )
    from_when, until = (
        datetime.fromtimestamp(seconds).isoformat(" ", "seconds") for seconds in (began, ended)
    )
    return f"{steps}, {from_when} to {until}"


def _failures(run: Run, history: History) -> list[Text]:
    """Render what ended the run, and what explains it."""
    failures = [
        (rank, entry)
        for rank, entries in run.timelines.items()
        for entry in entries
        if isinstance(entry, Failure)
    ]
    lines = [
        Text(printable(f"rank {rank}, step {failure.step}: {failure.words}"), style="red")
        for rank, failure in sorted(failures, key=lambda pair: pair[1].time_seconds)
    ]
    if any(failure.record for _, failure in failures):
        folder = next(iter(history.files.values())).parent.parent
        lines.append(Text(f"Type: trainer-plugins explain {quote(printable(folder))}"))
    return lines


def _strategies(timelines: Mapping[int, Sequence[Entry]]) -> list[Text]:
    """Render the strategies with which the run began or resumed, once if all ranks agree."""
    began = [
        entry for entries in timelines.values() for entry in entries if isinstance(entry, Beginning)
    ]
    return [
        Text(line)
        for line in dict.fromkeys(f"from step {entry.step}: {entry.strategy}" for entry in began)
    ]


def _by_moment(entries: Sequence[Entry]) -> dict[str, list[Sample]]:
    moments: dict[str, list[Sample]] = {}
    for entry in entries:
        if isinstance(entry, Sample):
            moments.setdefault(entry.moment, []).append(entry)
    return moments


def _releases(rank: int, entries: Sequence[Entry]) -> Text:
    flushes = [entry for entry in entries if isinstance(entry, Flush)]
    if not flushes:
        return Text(f"rank {rank}: no cached memory was released")
    released, seconds = sum(f.released_bytes for f in flushes), sum(f.seconds for f in flushes)
    num = sum(f.num_releases for f in flushes)
    return Text(
        f"rank {rank}: {num} releases gave back {size(released)} and took {seconds * 1000:.1f} ms"
    )


def _findings(rank: int, entries: Sequence[Entry]) -> list[Text]:
    remarks = [entry for entry in entries if isinstance(entry, Remark)]
    if not remarks:
        return [Text(f"rank {rank}: no findings", style="green")]
    return [
        Text(
            f"rank {rank}, step {remark.step}: {remark.finding}",
            style=_STYLES[remark.finding.severity],
        )
        for remark in remarks
    ]
