"""Render a memory report of the runs in a folder, as short tables for the terminal."""

from datetime import datetime
from shlex import quote

from rich.box import SIMPLE
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from trainer_plugins.finding import Finding
from trainer_plugins.printable import printable
from trainer_plugins.record.folder import output_dir_of
from trainer_plugins.record.history import (
    History,
    Run,
    Timelines,
    has_end,
    has_failed,
    ranks_in_words,
)
from trainer_plugins.report import summary
from trainer_plugins.report.pace import describe_pace, paces_of
from trainer_plugins.report.page import STYLES
from trainer_plugins.units import percent, size


def history_report(history: History, ending: Finding | None = None) -> RenderableType:
    """Render the runs, the last first; `ending` says how it ended, if its timeline does not."""
    parts: list[RenderableType] = []
    num_runs = len(history.runs)
    if num_runs > 1:
        parts.append(Text(f"{num_runs} runs wrote to this folder; the last one comes first"))
    for number, run in reversed([*enumerate(history.runs, start=1)]):
        if num_runs > 1:
            parts.append(Text(f"\nRun {number} of {num_runs}: {describe_steps(run)}", style="bold"))
        if ending is not None and number == num_runs:
            parts.append(Text(str(ending), style=STYLES[ending.severity]))
        else:
            parts += _endless(run, is_last=number == num_runs)
        parts += [*_failures(run, history), memory_report(run.timelines)]
        parts += [Text(printable(line)) for line in summary.places_of(run)]
    if not history.runs:
        parts.append(Text("The files are empty"))
    for rank, num in history.num_passed_over.items():
        if num:
            lines = f"rank {rank}: skipped {num} {'line' if num == 1 else 'lines'}"
            why = "cut off by a kill or a full disk, damaged, or written by a later version"
            parts.append(Text(f"{lines}: {why}"))
    parts.append(Text("files: " + ", ".join(printable(path) for path in history.files.values())))
    return Group(*parts)


def memory_report(timelines: Timelines) -> RenderableType:
    """Render the timelines of one run by rank: peak of each moment, releases, findings."""
    has_several = len(timelines) > 1
    title = f"Peak memory in each moment{', on the fullest rank' if has_several else ''}"
    table = Table(title=title, title_justify="left", box=SIMPLE)
    for column in ("rank", "moment", "device"):
        table.add_column(column)
    numbers = ("readings", "peak", "full", "total", "reserved")
    for column in (*numbers, "least full rank") if has_several else numbers:
        table.add_column(column, justify="right")
    for each in summary.peaks(timelines):
        cells = [
            str(each.rank),
            printable(each.moment),
            printable(each.device),
            str(each.num_readings),
            size(each.peak_bytes),
            percent(each.pressure),
            size(each.total_bytes),
            size(each.reserved_bytes),
        ]
        if has_several:
            cells.append(f"{percent(each.least_pressure)} (rank {each.least_rank})")
        table.add_row(*cells)
    strategies = map(Text, summary.strategies_of(timelines))
    pace = describe_pace([*paces_of(next(iter(timelines.values())))])
    times = [Text(pace)] if pace else []
    return Group(*strategies, table, *times, _releases(timelines), *_findings(timelines))


def describe_steps(run: Run) -> str:
    """Describe the steps and the time of a run."""
    began, ended = (datetime.fromtimestamp(each).isoformat(" ", "seconds") for each in run.seconds)
    return f"{summary.steps_in_words(*run.steps)}, {began} to {ended}"


def _failures(run: Run, history: History) -> list[Text]:
    failures = summary.failures_of(run.timelines)
    has_several = len({*run.hosts.values()}) > 1
    hosts = {rank: f" on {host}" for rank, host in run.hosts.items() if has_several}
    lines = [
        Text(
            printable(f"rank {rank}{hosts.get(rank, '')}, step {failure.step}: {failure.words}"),
            style="red",
        )
        for rank, failure in failures
    ]
    if any(failure.record for _, failure in failures):
        folder = output_dir_of(next(iter(history.files.values())).parent.parent)
        lines.append(Text(f"To see why: trainer-plugins explain {quote(printable(folder))}"))
    return lines


def _releases(timelines: Timelines) -> Text:
    given, who = summary.releases(timelines), ranks_in_words([*timelines])
    if not given.num:
        return Text(f"{who}: no cached memory released")
    longest = " on the slowest rank" if len(timelines) > 1 else ""
    took = f"took {given.seconds * 1000:.1f} ms{longest}"
    return Text(f"{who}: {given.num} releases freed {size(given.released_bytes)} and {took}")


def _findings(timelines: Timelines) -> list[Text]:
    """Render each finding once; no findings is good news only if the run ended well."""
    found = summary.merge_findings(timelines)
    if not found:
        in_order = all(has_end(each) and not has_failed(each) for each in timelines.values())
        return [Text(f"{ranks_in_words([*timelines])}: no findings", "green" if in_order else "")]
    lines = []
    for each in found:
        where = summary.steps_in_words(each.first_step, each.last_step)
        times = f", x {each.times}, at worst" if each.times > 1 else ""
        line = f"{ranks_in_words(each.ranks)}, {where}{times}: {each.finding}"
        lines.append(Text(line, style=STYLES[each.finding.severity]))
    return lines


def _endless(run: Run, is_last: bool) -> list[Text]:
    """Name the ranks whose timeline has neither an end nor an error."""
    if not run.silent_ranks:
        return []
    why = "it is still running" if is_last else "the process was killed, or its disk was full"
    return [Text(f"{ranks_in_words(run.silent_ranks)}: the timeline does not end: {why}", "yellow")]
