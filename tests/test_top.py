"""A run is watched from outside: whatever its ranks write, whenever, the terminal shows where they stand."""

import json
import os
import pty
import select
import signal
import struct
import sys
import termios
import time
from collections.abc import Iterator
from dataclasses import replace
from fcntl import ioctl
from io import StringIO
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from tests.processes import ENDS_A_HANG, end, start
from tests.said_device import SaidDevice
from tests.test_report import HOSTILE, obeyed
from trainer_plugins.cli import app
from trainer_plugins.finding import Finding, Severity
from trainer_plugins.reading import MemoryReading
from trainer_plugins.record.history import Run, follow
from trainer_plugins.record.timeline import (
    Beginning,
    Failure,
    Remark,
    Sample,
    Timeline,
    thin,
    to_line,
)
from trainer_plugins.report.top_page import MOST_PEAKS, RankLine, TopPage, rank_lines
from trainer_plugins.strategy import Strategy
from trainer_plugins.units import GIB, MIB
from trainer_plugins.watch.leak import WARM_UP_LOOKS, WINDOW
from trainer_plugins.watch.memory_watch import MemoryWatch

READING = MemoryReading(
    device="cuda:0",
    total_bytes=80 * GIB,
    free_bytes=20 * GIB,
    reserved_bytes=50 * GIB,
    allocated_bytes=30 * GIB,
    peak_allocated_bytes=40 * GIB,
)
FINDING = Finding(
    code="memory-pressure", severity=Severity.WARNING, summary="s", evidence="e", remedy="r"
)


def file_of(folder: Path, rank: int) -> Path:
    return folder / "_trainer_plugins" / "memory" / f"rank-{rank}.jsonl"


def sample(step: int, moment: str = "train", reading: MemoryReading = READING) -> Sample:
    return Sample(step=step, moment=moment, reading=reading, time_seconds=1000 + step)


def begun(folder: Path, rank: int = 0) -> Timeline:
    timeline = Timeline(file_of(folder, rank))
    timeline.add(sample(0, "begin"))
    return timeline


def top(folder: Path, *options: str) -> str:
    done = CliRunner().invoke(app, ["top", str(folder), "--once", *options])
    assert done.exit_code == 0, done.output
    return done.stdout


def looked(follower: Iterator[Run | None]) -> list[RankLine]:
    run = next(follower)
    assert run is not None
    return rank_lines(run)


def num_trained(follower: Iterator[Run | None]) -> int:
    run = next(follower)
    assert run is not None
    samples = [each for each in run.timelines[0] if isinstance(each, Sample)]
    return sum(each.num_readings for each in samples if each.moment == "train")


def drawn(lines: list[RankLine], *, width: int, encoding: str = "utf-8") -> list[str]:
    class Screen(StringIO):
        pass

    Screen.encoding = encoding
    screen = Screen()
    Console(file=screen, width=width).print(TopPage("run", lines, None, 1100.0))
    return [line.rstrip() for line in screen.getvalue().splitlines()]


def test_a_run_is_followed_from_before_its_first_line(tmp_path: Path) -> None:
    follower = follow(tmp_path / "run")
    assert next(follower) is None

    zero = begun(tmp_path / "run", 0)
    zero.add(sample(1))
    assert [(line.rank, line.step) for line in looked(follower)] == [(0, 1)]

    one = begun(tmp_path / "run", 1)  # comes late
    for step in (2, 3):
        zero.add(sample(step))
    one.add(sample(1, "eval"))
    zero.add(Remark(step=3, finding=FINDING, time_seconds=1004))

    lines = looked(follower)
    assert [(line.rank, line.step, line.state) for line in lines] == [
        (0, 3, "train"),
        (1, 1, "eval"),
    ]
    assert [line.remark.finding if line.remark else None for line in lines] == [FINDING, None]


def test_only_what_is_new_is_read(tmp_path: Path) -> None:
    timeline = begun(tmp_path)
    for step in range(1, 6):
        timeline.add(sample(step))
    follower = follow(tmp_path)
    next(follower)
    with file_of(tmp_path, 0).open("r+b") as file:  # what was read is gone, unnoticed
        file.write(b" " * len(to_line(sample(0, "begin"))))

    timeline.add(sample(6))
    assert num_trained(follower) == 6
    assert num_trained(follow(tmp_path)) == 6


def test_half_a_line_waits_for_its_other_half(tmp_path: Path) -> None:
    begun(tmp_path).close()
    follower = follow(tmp_path)
    line = to_line(sample(7)).encode() + b"\n"
    with file_of(tmp_path, 0).open("ab", buffering=0) as file:
        for piece, step in ((line[:40], 0), (line[40:-1], 0), (line[-1:], 7)):
            file.write(piece)
            assert looked(follower)[0].step == step
        file.write(b"\xff{" * 2_000_000)  # damaged, and longer than any line of ours
        assert looked(follower)[0].step == 7
        file.write(b"\n" + to_line(sample(8)).encode() + b"\n")
    assert looked(follower)[0].step == 8


def test_a_timeline_that_is_thinned_emptied_or_made_anew_is_read_anew(tmp_path: Path) -> None:
    timeline = begun(tmp_path)
    for step in range(1, 401):
        timeline.add(sample(step))
    follower = follow(tmp_path)
    assert num_trained(follower) == 400

    path = file_of(tmp_path, 0)
    num_bytes = path.stat().st_size
    assert thin(path) < num_bytes
    timeline.add(sample(401))
    assert num_trained(follower) == 401

    path.unlink()
    assert next(follower) is None
    path.write_text(to_line(sample(3, "eval")) + "\n")
    assert looked(follower)[0].step == 3

    os.truncate(path, 0)
    assert next(follower) is None
    path.write_text(to_line(sample(4, "eval")) + "\n")  # as long as the line before
    assert looked(follower)[0].step == 4


def test_of_several_runs_in_a_folder_the_last_one_is_shown(tmp_path: Path) -> None:
    for rank in (0, 1):
        timeline = begun(tmp_path, rank)
        timeline.add(sample(50))
        timeline.add(Remark(step=50, finding=FINDING, time_seconds=1050))
    follower = follow(tmp_path)
    assert [line.rank for line in looked(follower)] == [0, 1]

    again = Timeline(file_of(tmp_path, 0))
    again.add(replace(sample(0, "begin"), time_seconds=2000))
    (line,) = looked(follower)
    assert (line.rank, line.step, line.remark) == (0, 0, None)
    assert json.loads(top(tmp_path, "--json"))["ranks"][0]["step"] == 0


def test_the_steps_left_are_those_that_the_watch_tells(tmp_path: Path) -> None:
    device, timeline = SaidDevice(), Timeline(file_of(tmp_path, 0))
    watch = MemoryWatch(device, timeline)
    follower = follow(tmp_path)
    for step in range(1, WARM_UP_LOOKS + WINDOW + 1):
        device.non_torch_bytes += 50 * MIB
        watch.look(step, "train")
        (line,) = looked(follower)
        assert bool(line.growth) == (step == WARM_UP_LOOKS + WINDOW)

    assert line.growth is not None
    assert line.growth.kind == "non_torch"
    assert line.growth.bytes_a_step == 50 * MIB
    left = line.growth.steps_left
    assert line.remark is not None
    assert line.remark.finding.summary.endswith(f"out of memory in about {left} steps")
    row = top(tmp_path).splitlines()[-1]
    assert f" ~{left} " in row
    assert " leak-non-torch " in row

    watch.look(step, "end")
    (line,) = looked(follower)
    assert (line.state, line.growth) == ("end", None)


def test_the_trend_of_a_long_run_is_short_and_keeps_its_peak(tmp_path: Path) -> None:
    timeline = begun(tmp_path)
    highest = replace(READING, peak_allocated_bytes=60 * GIB)
    follower = follow(tmp_path)
    for step in range(1, 2001):
        timeline.add(sample(step, reading=highest if step == 777 else READING))
        if step % 500 == 0:
            (line,) = looked(follower)

    assert MOST_PEAKS // 2 <= len(line.trend) <= MOST_PEAKS
    assert [777 * len(line.trend) // 2000] == [
        at for at, pressure in enumerate(line.trend) if pressure == highest.pressure
    ]


def test_a_rank_that_failed_is_said_first_and_what_to_type(tmp_path: Path) -> None:
    strategy = Strategy(
        distributed_type="MULTI_GPU", wrapped_class="DDP", family="ddp", world_size=4,
        device="cuda", num_params=1,
    )  # fmt: skip
    for rank in (0, 1):
        timeline = Timeline(file_of(tmp_path, rank))
        timeline.add(Beginning(step=0, strategy=strategy, time_seconds=1000))
        timeline.add(sample(1))
    timeline.add(
        Failure(step=1, words="OutOfMemoryError: x", record="oom-rank-1.json", time_seconds=1002)
    )

    heading, failed, advice, _, _, *rows = top(tmp_path).splitlines()
    assert heading == f"{tmp_path}: 2 of 4 ranks"
    assert failed == "rank 1: OutOfMemoryError: x"
    assert advice == f"Why: trainer-plugins explain {tmp_path}"
    assert [row.split()[:4] for row in rows] == [
        ["0", "cuda:0", "train", "1"],
        ["1", "cuda:0", "failed", "1"],
    ]


def test_the_bar_divides_the_card_and_fits_the_terminal(tmp_path: Path) -> None:
    begun(tmp_path).add(sample(12))
    lines = looked(follow(tmp_path))

    assert drawn(lines, width=140)[-1].split() == [
        "0", "cuda:0", "train", "12", "████████▒▒▒▒░░░·····",
        "30.0/50.0/10.0", "of", "80.0", "GiB", "▁▁", "88", "s",
    ]  # fmt: skip
    assert drawn(lines, width=80)[-1].split() == [
        "0", "cuda:0", "train", "12", "████▒▒▒▒░···", "88", "s",
    ]  # fmt: skip
    assert drawn(lines, width=140, encoding="ascii")[-1].split()[4] == "########====xxx....."


def test_foreign_text_is_shown_and_not_obeyed(tmp_path: Path) -> None:
    timeline = begun(tmp_path)
    timeline.add(sample(1, HOSTILE, replace(READING, device=HOSTILE)))
    timeline.add(Remark(step=1, finding=replace(FINDING, code=HOSTILE)))
    assert obeyed("".join(drawn(looked(follow(tmp_path)), width=140))) == []
    assert obeyed(top(tmp_path)) == []
    timeline.add(Failure(step=1, words=HOSTILE))
    assert obeyed(top(tmp_path)) == []
    assert obeyed(top(tmp_path, "--json")) == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--once"], "has no entries in memory/rank-*.jsonl"),
        (["--once", "--json"], "has no entries in memory/rank-*.jsonl"),
        (["--json"], "add --once"),
        ([], "is not a terminal: add --once"),
        (["--once", "--every", "nan"], "0.1 to 3600 seconds"),
        (["--once", "--every", "0"], "0.1 to 3600 seconds"),
    ],
)
def test_bad_input_is_said_in_a_line(tmp_path: Path, options: list[str], said: str) -> None:
    done = CliRunner().invoke(
        app, ["top", str(tmp_path / "run"), *options], env={"COLUMNS": "1000"}
    )
    assert done.exit_code == 2
    assert said in done.output


def test_what_is_no_folder_or_no_file_keeps_nobody_waiting(tmp_path: Path) -> None:
    path = file_of(tmp_path, 0)
    path.parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(path)
    for wrong in (tmp_path, path):
        done = CliRunner().invoke(app, ["top", str(wrong), "--once"], env={"COLUMNS": "1000"})
        assert done.exit_code == 2
        assert f"{path}: not a " in done.output


class Terminal:
    """A terminal in which the command runs, and what it has shown."""

    def __init__(self, folder: Path) -> None:
        self._ours, theirs = pty.openpty()
        ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 140, 0, 0))
        kept = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}
        self.process = start(
            [sys.executable, "-m", "trainer_plugins", "top", folder.name, "--every", "0.1"],
            stdout=theirs, stderr=theirs, environ={**kept, "TERM": "xterm"}, cwd=folder.parent,
            # a test that runs in the background of a shell has it ignored, and hands that on
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )  # fmt: skip
        os.close(theirs)
        self.shown = ""

    def wait_for(self, text: str) -> None:
        """Read until a text is shown. It must fit into a line: the folder's name is a short one."""
        until = time.monotonic() + ENDS_A_HANG
        while text not in self.shown:
            assert time.monotonic() < until, self.shown[-2000:]
            ready, _, _ = select.select([self._ours], [], [], ENDS_A_HANG)
            assert ready, self.shown
            self.shown += os.read(self._ours, 1 << 16).decode(errors="replace")

    def interrupt(self) -> int:
        self.process.send_signal(signal.SIGINT)
        (code,) = end(self.process)
        os.close(self._ours)
        return code


def test_it_waits_for_the_run_shows_it_and_ends_quietly(tmp_path: Path) -> None:
    terminal = Terminal(tmp_path / "run")
    terminal.wait_for("waiting for the run to start")
    timeline = begun(tmp_path / "run")
    terminal.wait_for("begin   ")
    timeline.add(sample(4711))
    terminal.wait_for(" 4711 ")
    assert terminal.interrupt() == 0
    assert "Traceback" not in terminal.shown
    assert "Abort" not in terminal.shown
