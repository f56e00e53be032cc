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
from trainer_plugins.record.timeline import Beginning, Entry, Failure
from trainer_plugins.report.summary import has_end, has_failed, peaks, releases, repeated
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
        else:
            parts += _endless(run, is_last=number == num_runs)
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
    has_several = len(timelines) > 1
    of_which = ", on the fullest rank" * has_several
    table = Table(
        title=f"Memory: the peak of each moment{of_which}", title_justify="left", box=SIMPLE
    )
    for column in ("rank", "moment", "device"):
        table.add_column(column)
    for column in ("readings", "peak", "full", "total", "reserved"):
        table.add_column(column, justify="right")
    if has_several:
        table.add_column("the least full rank", justify="right")
    for each in peaks(timelines):
        least = f"{percent(each.least_pressure)} (rank {each.least_rank})"
        table.add_row(
            str(each.rank),
            printable(each.moment),
            printable(each.device),
            str(each.num_readings),
            size(each.peak_bytes),
            percent(each.pressure),
            size(each.total_bytes),
            size(each.reserved_bytes),
            *[least] * has_several,
        )
    return Group(*_strategies(timelines), table, _releases(timelines), *_findings(timelines))


def when(run: Run) -> str:
    """Say which steps a run had, and when."""
    (first_step, last_step), (began, ended) = run.steps, run.seconds
    steps = _steps(first_step, last_step)
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


def _releases(timelines: Mapping[int, Sequence[Entry]]) -> Text:
    given, who = releases(timelines), _ranks(tuple(timelines))
    if not given.num:
        return Text(f"{who}: no cached memory was released")
    longest = ", where it took longest" * (len(timelines) > 1)
    return Text(
        f"{who}: {given.num} releases gave back {size(given.released_bytes)} and took"
        f" {given.seconds * 1000:.1f} ms{longest}"
    )


def _findings(timelines: Mapping[int, Sequence[Entry]]) -> list[Text]:
    """Render each finding once; that there is none is good news only of a run that ended."""
    found = repeated(timelines)
    if not found:
        in_order = all(has_end(each) and not has_failed(each) for each in timelines.values())
        return [Text(f"{_ranks(tuple(timelines))}: no findings", "green" if in_order else "")]
    return [
        Text(
            f"{_ranks(each.ranks)}, {_steps(each.first_step, each.last_step)}"
            f"{f', x {each.times}, at worst' if each.times > 1 else ''}: {each.finding}",
            style=_STYLES[each.finding.severity],
        )
        for each in found
    ]


def _endless(run: Run, is_last: bool) -> list[Text]:
    """Say of which ranks no end and no error is known."""
    ranks = tuple(
        rank
        for rank, entries in run.timelines.items()
        if not has_end(entries) and not has_failed(entries)
    )
    if not ranks:
        return []
    why = "it still runs" if is_last else "its process was killed"
    return [Text(f"{_ranks(ranks)}: no end of the training was noted: {why}", "yellow")]


def _ranks(ranks: Sequence[int]) -> str:
    """Name ranks shortly, however many there are.

    >>> _ranks((0,)), _ranks((0, 1, 2, 3)), _ranks((0, 2, 7))
    ('rank 0', 'ranks 0 to 3', '3 ranks of 0 to 7')
    """
    first, last = min(ranks), max(ranks)
    if first == last:
        return f"rank {first}"
    many = "ranks" if len(ranks) == last - first + 1 else f"{len(ranks)} ranks of"
    return f"{many} {first} to {last}"


def _steps(first: int, last: int) -> str:
    return f"step {first}" if first == last else f"steps {first} to {last}"
