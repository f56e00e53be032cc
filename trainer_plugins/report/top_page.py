"""Render the state of each rank of a run, one line per rank, for a live terminal."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from shlex import quote

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from trainer_plugins.printable import printable
from trainer_plugins.reading import MemoryReading
from trainer_plugins.record.history import Run
from trainer_plugins.record.timeline import Entry, Failure, Remark, Sample
from trainer_plugins.report.pace import seconds_text
from trainer_plugins.report.page import STYLES
from trainer_plugins.units import GIB, MIB
from trainer_plugins.watch.leak import WARM_UP_LOOKS, WINDOW, Footprint, Growth, growths

_PARTS = (("█", "allocated", "green"), ("▒", "cached", "cyan"), ("░", "outside torch", "magenta"))
_FREE = ("·", "free", "dim")
_HEIGHTS = "▁▂▃▄▅▆▇█"
_PLAIN = str.maketrans("█▒░·▁▂▃▄▅▆▇", "#=x.1234567")  # without block elements
_FLAT = 0.1  # a trend spanning less of the device is drawn as if it spanned this much
_WIDTH_WITH_SIZES = 110
_WIDTH_WITH_TREND = 130
MOST_PEAKS = 24  # in a trend


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLine:
    """Holds the state of one rank."""

    rank: int
    step: int
    state: str  # the last moment of the run, as a `Sample` names it; `failed` after an error
    time_seconds: float  # when the rank last wrote, in seconds since the Unix epoch
    reading: MemoryReading | None
    trend: Sequence[float]  # the highest pressure in equal stretches of the run, oldest first
    growth: Growth | None  # the growing memory that runs out first, if any grows
    remark: Remark | None  # the last finding
    failure: Failure | None


def rank_lines(run: Run) -> list[RankLine]:
    """Describe the state of each rank of a run."""
    return [_describe_rank(rank, entries) for rank, entries in run.timelines.items()]


def _describe_rank(rank: int, entries: Sequence[Entry]) -> RankLine:
    samples = [each for each in entries if isinstance(each, Sample)]
    remarks = [each for each in entries if isinstance(each, Remark)]
    failures = [each for each in entries if isinstance(each, Failure)]
    moment = samples[-1].moment if samples else "begin"
    return RankLine(
        rank=rank,
        step=entries[-1].step,
        state="failed" if failures else moment,
        time_seconds=entries[-1].time_seconds,
        reading=samples[-1].reading if samples else None,
        trend=_trend([each.reading.pressure for each in samples]),
        growth=None if failures or moment == "end" else _growth(samples),
        remark=remarks[-1] if remarks else None,
        failure=failures[-1] if failures else None,
    )


def _trend(pressures: Sequence[float]) -> tuple[float, ...]:
    length = max(1, math.ceil(len(pressures) / MOST_PEAKS))
    return tuple(max(pressures[at : at + length]) for at in range(0, len(pressures), length))


def _growth(samples: Sequence[Sample]) -> Growth | None:
    """Judge the last steps as `MemoryWatch` does; a card's timeline lacks main memory."""
    trained = [each for each in samples if each.moment == "train"]
    if sum(each.num_readings for each in trained) < WARM_UP_LOOKS + WINDOW:
        return None
    last = trained[-1].reading
    is_host = last.device == "cpu"
    window = [
        Footprint.take(each.step, each.reading, each.reading.allocated_bytes if is_host else 0)
        for each in trained[-WINDOW:]
    ]
    fatal = (growth for growth in growths(window, last, last) if growth.ends_the_run)
    return min(fatal, key=lambda growth: growth.steps_left, default=None)


@dataclass(frozen=True, slots=True)
class TopPage:
    """Renders the ranks of one run, fitted to the terminal's width."""

    run_dir: str
    ranks: Sequence[RankLine]
    world_size: int | None  # the ranks that train, if known; some may not have written yet
    now_seconds: float

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        def draw(text: str) -> str:
            return text.translate(_PLAIN) if options.ascii_only else text

        num = len(self.ranks)
        of_all = f" of {self.world_size}" if self.world_size and self.world_size > num else ""
        ranks = "rank" if num == 1 and not of_all else "ranks"
        yield Text(f"{printable(self.run_dir)}: {num}{of_all} {ranks}")
        yield from self._news()
        yield Text("  ").join(
            Text(f"{draw(sign)} {part}", style) for sign, part, style in (*_PARTS, _FREE)
        )
        has_sizes = options.max_width >= _WIDTH_WITH_SIZES
        has_trend = options.max_width >= _WIDTH_WITH_TREND
        bar_width = 20 if has_sizes else 12
        table = Table(box=None, pad_edge=False, header_style="dim")
        table.add_column("rank", justify="right", no_wrap=True)
        table.add_column("device", overflow="fold")
        table.add_column("moment", overflow="fold")
        table.add_column("step", justify="right", no_wrap=True)
        table.add_column("memory", no_wrap=True, min_width=bar_width)
        if has_sizes:
            table.add_column("alloc/reserved/outside", justify="right", no_wrap=True)
        if has_trend:
            table.add_column("trend", no_wrap=True)
        table.add_column("steps left", justify="right")
        table.add_column("last finding", overflow="fold")
        table.add_column("seen", justify="right", no_wrap=True)
        for line in self.ranks:
            reading, found = line.reading, line.remark.finding if line.remark else None
            bar = ((draw(part), style) for part, style in _bar(reading, bar_width))
            cells: list[str | Text] = [
                str(line.rank),
                printable(reading.device) if reading else "",
                Text(printable(line.state), "red" if line.failure else ""),
                str(line.step),
                Text.assemble(*bar),
            ]
            if has_sizes:
                cells.append(_sizes(reading))
            if has_trend:
                cells.append(draw(_heights(line.trend)))
            cells += [
                Text(f"~{line.growth.steps_left}" if line.growth else "", "red"),
                Text(printable(found.code), STYLES[found.severity]) if found else "",
                # Never negative: the clocks of two machines may differ.
                seconds_text(max(1.0, self.now_seconds - line.time_seconds)),
            ]
            table.add_row(*cells)
        yield table

    def _news(self) -> list[Text]:
        """Render the first failure, else the newest finding, with its remedy."""
        failed = [line for line in self.ranks if line.failure]
        if failed:
            first = min(failed, key=lambda line: line.time_seconds)
            assert first.failure is not None
            news = [Text(printable(f"rank {first.rank}: {first.failure.words}"), "red")]
            if first.failure.record:
                news.append(Text(f"Why: trainer-plugins explain {quote(printable(self.run_dir))}"))
            return news
        remarks = [(line.rank, line.remark) for line in self.ranks if line.remark]
        if not remarks:
            return []
        rank, remark = max(remarks, key=lambda pair: pair[1].time_seconds)
        style = STYLES[remark.finding.severity]
        return [Text(f"rank {rank}, step {remark.step}: {remark.finding}", style)]


def _bar(reading: MemoryReading | None, width: int) -> list[tuple[str, str]]:
    """Divide the bar like the card; only ends are rounded, so its length is constant."""
    if reading is None:
        return []
    sizes = (reading.allocated_bytes, reading.cached_bytes, reading.non_torch_bytes)
    bar, end, filled = [], 0, 0
    for (sign, _, style), num_bytes in zip(_PARTS, sizes, strict=True):
        end = min(end + max(0, num_bytes), reading.total_bytes)
        upto = round(width * end / reading.total_bytes)
        bar.append((sign * (upto - filled), style))
        filled = upto
    return [*bar, (_FREE[0] * (width - filled), _FREE[2])]


def _sizes(reading: MemoryReading | None) -> str:
    if reading is None:
        return ""
    unit, name, digits = (GIB, "GiB", 1) if reading.total_bytes >= GIB else (MIB, "MiB", 0)
    used = (reading.allocated_bytes, reading.reserved_bytes, reading.non_torch_bytes)
    parts = "/".join(f"{num_bytes / unit:.{digits}f}" for num_bytes in used)
    return f"{parts} of {reading.total_bytes / unit:.{digits}f} {name}"


def _heights(trend: Sequence[float]) -> str:
    """Draw the pressure above its minimum, so that a slow rise is visible and noise is not."""
    if not trend:
        return ""
    low, span = min(trend), max(max(trend) - min(trend), _FLAT)
    top = len(_HEIGHTS) - 1
    return "".join(_HEIGHTS[round(top * (pressure - low) / span)] for pressure in trend)
