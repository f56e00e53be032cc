"""A timeline that grows long is thinned: no peak is lost, nothing else is harmed, and the file stays small."""

import os
import re
import resource
import signal
import subprocess
import sys
from dataclasses import replace
from io import StringIO
from itertools import count, pairwise
from pathlib import Path

import pytest
from rich.console import Console

from tests.test_timeline import ENTRIES, READING
from trainer_plugins.reading import MemoryReading
from trainer_plugins.record.history import read_history
from trainer_plugins.record.timeline import (
    MAX_FILE_BYTES,
    Beginning,
    Entry,
    Flush,
    Remark,
    Sample,
    Timeline,
    from_line,
    read_timeline,
)
from trainer_plugins.report.text import memory_report
from trainer_plugins.strategy import Strategy
from trainer_plugins.units import GIB, MIB

NUM_STEPS = 26_000
LONG_NAME = "cuda:" + "0" * 150  # so that a file is soon long
PLAIN = MemoryReading(
    device=LONG_NAME,
    total_bytes=80 * GIB,
    free_bytes=40 * GIB,
    reserved_bytes=39 * GIB,
    allocated_bytes=20 * GIB,
    peak_allocated_bytes=30 * GIB,
    num_alloc_retries=0,
)
# Steps at which one figure is the highest of the run, each of another reading.
HIGHEST = {
    101: replace(PLAIN, peak_allocated_bytes=38 * GIB),
    2_203: replace(PLAIN, reserved_bytes=39 * GIB + MIB),
    2_206: replace(
        PLAIN, free_bytes=39 * GIB, reserved_bytes=10 * GIB, peak_allocated_bytes=9 * GIB
    ),
    15_004: replace(
        PLAIN, free_bytes=38 * GIB, reserved_bytes=39 * GIB, peak_allocated_bytes=20 * GIB
    ),
}
STRATEGY = Strategy(
    distributed_type="NO",
    wrapped_class="M",
    family="nothing",
    world_size=1,
    device="cuda",
    num_params=7,
)


def long_run() -> list[Entry]:
    """A run of many steps, with an evaluation, a finding and a release now and then."""
    seconds = count(1_000_000.0)
    entries: list[Entry] = [Beginning(step=0, strategy=STRATEGY, time_seconds=next(seconds))]
    entries.append(Sample(step=0, moment="begin", reading=PLAIN, time_seconds=next(seconds)))
    for step in range(1, NUM_STEPS + 1):
        reading = HIGHEST.get(
            step, replace(PLAIN, peak_allocated_bytes=30 * GIB + (step * 7919) % MIB)
        )
        entries.append(
            Sample(step=step, moment="train", reading=reading, time_seconds=next(seconds))
        )
        if step % 500 == 0:
            entries.append(
                Sample(step=step, moment="eval", reading=PLAIN, time_seconds=next(seconds))
            )
        if step % 1000 == 0:
            finding = replace(ENTRIES[2].finding, amount=float(step))  # type: ignore[union-attr]
            entries.append(Remark(step=step, finding=finding, time_seconds=next(seconds)))
        if step % 10 == 0:
            flush = Flush(
                step=step,
                reason="interval",
                released_bytes=MIB,
                stuck_bytes=step,
                seconds=0.5,
                time_seconds=0,
            )
            entries.append(replace(flush, time_seconds=next(seconds)))
    entries.append(Sample(step=NUM_STEPS, moment="end", reading=PLAIN, time_seconds=next(seconds)))
    return entries


def text(entries: list[Entry]) -> str:
    console = Console(file=StringIO(), width=400, record=True)
    console.print(memory_report({0: entries}))
    # The slowest step is one of those whose reading stayed.
    return re.sub(r", in step \d+", "", console.export_text())


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> tuple[list[Entry], Path, int]:
    """The entries of a long run, its file, and the most bytes that this had."""
    path = tmp_path_factory.mktemp("run") / "_trainer_plugins" / "memory" / "rank-0.jsonl"
    timeline, largest, entries = Timeline(path), 0, long_run()
    for entry in entries:
        timeline.add(entry)
        largest = max(largest, path.stat().st_size)
    return entries, path, largest


def test_the_file_stays_below_its_bound_and_the_report_is_the_same(run) -> None:
    entries, path, largest = run
    left = read_timeline(path)

    assert sum(len(line) for line in path.read_bytes().splitlines()) < MAX_FILE_BYTES
    assert (
        MAX_FILE_BYTES < largest < MAX_FILE_BYTES + 1000
    )  # it is thinned by the entry that follows, and not before
    assert len(left) < len(entries) * 2 // 3
    assert text(left) == text(entries)
    assert os.listdir(path.parent) == ["rank-0.jsonl"]


def test_readings_stay_as_they_were_taken(run) -> None:
    entries, path, _ = run
    taken = {(each.step, each.moment): each for each in entries if isinstance(each, Sample)}
    left = [each for each in read_timeline(path) if isinstance(each, Sample)]

    assert all(replace(each, num_readings=1) == taken[each.step, each.moment] for each in left)
    assert {
        each.step: each.reading for each in left if each.step in HIGHEST and each.moment == "train"
    } == HIGHEST
    assert sum(each.num_readings for each in left) == len(taken)
    assert [each.step for each in left] == sorted(each.step for each in left)
    steps = [each.step for each in left if each.moment == "train"]
    assert steps[-5000:] == [*range(NUM_STEPS - 4999, NUM_STEPS + 1)]  # the newest are all there
    gaps = [after - before for before, after in pairwise(steps)]
    assert max(gaps[:1000]) <= 64  # and of the oldest some


def test_findings_beginnings_and_sums_are_kept(run) -> None:
    entries, path, _ = run
    left = read_timeline(path)

    for kind in (Remark, Beginning):
        assert [each for each in left if isinstance(each, kind)] == [
            each for each in entries if isinstance(each, kind)
        ]
    before, after = ([each for each in many if isinstance(each, Flush)] for many in (entries, left))
    assert len(after) < len(before)
    assert sum(each.num_releases for each in after) == len(before)
    assert sum(each.released_bytes for each in after) == MIB * len(before)
    assert max(each.stuck_bytes for each in after) == NUM_STEPS


def lines(num: int) -> bytes:
    """Lines of a file that is thinned at the next entry, if they are enough."""
    return b"".join(
        b'{"kind": "sample", "time_seconds": 1.000, "step": %d, "moment": "train", "device": "%s", '
        b'"total_bytes": 100, "free_bytes": 40, "reserved_bytes": 50, "allocated_bytes": 30, '
        b'"peak_allocated_bytes": 45, "num_alloc_retries": 2}\n' % (step, LONG_NAME.encode())
        for step in range(num)
    )


ENOUGH = 23_000


def test_a_file_of_an_older_version_is_thinned_and_what_nobody_reads_is_left_alone(
    tmp_path: Path,
) -> None:
    path = tmp_path / "rank-0.jsonl"
    strange = (
        b'{"kind": "of-a-later-version", "step": 1}\nhalf a li\n\0\0\xff\n' + b"[" * 3000 + b"\n"
    )
    path.write_bytes(strange + lines(ENOUGH) + strange)
    path.chmod(0o640)
    assert path.stat().st_size > MAX_FILE_BYTES
    Timeline(path).add(ENTRIES[0])

    assert path.stat().st_size < MAX_FILE_BYTES * 7 // 8
    assert path.read_bytes().startswith(strange)
    assert strange in path.read_bytes()[-2 * len(strange) - 1000 :]
    assert path.stat().st_mode & 0o777 == 0o640
    assert (
        sum(entry.num_readings for entry in read_timeline(path) if isinstance(entry, Sample))
        == ENOUGH + 1
    )


def test_two_runs_of_one_folder_are_never_held_against_each_other(tmp_path: Path) -> None:
    path = tmp_path / "_trainer_plugins" / "memory" / "rank-0.jsonl"
    timeline = Timeline(path)
    for high, num in (
        (45, 3),
        (20, 3),
        (30, 23_000),
    ):  # the peak of the second is lower than those beside it
        reading = replace(READING, device=LONG_NAME, peak_allocated_bytes=high)
        timeline.add(Sample(step=0, moment="begin", reading=reading))
        for step in range(1, num):
            timeline.add(Sample(step=step, moment="train", reading=reading))

    peaks = [
        max(
            each.reading.peak_allocated_bytes
            for each in run.timelines[0]
            if isinstance(each, Sample)
        )
        for run in read_history(tmp_path).runs
    ]
    assert peaks == [45, 20, 30]


def test_a_reader_that_has_the_file_open_keeps_a_whole_one(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.jsonl"
    path.write_bytes(lines(ENOUGH))
    with path.open("rb") as reader:
        first = reader.readline()
        Timeline(path).add(ENTRIES[0])
        rest = reader.readlines()

    assert [from_line(first), *map(from_line, rest)].count(None) == 0
    assert len(rest) == ENOUGH - 1
    assert len(read_timeline(path)) < ENOUGH


def test_a_kill_in_the_middle_leaves_the_old_file_and_the_next_run_thins_it(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.jsonl"
    path.write_bytes(lines(ENOUGH))
    code = f"""
import os, signal, sys
sys.path.insert(0, {str(Path(__file__).parent.parent)!r})
from pathlib import Path
from tests.test_timeline import ENTRIES
from trainer_plugins.record.timeline import Timeline
sys.addaudithook(lambda event, args: event == "os.rename" and os.kill(os.getpid(), signal.SIGKILL))
Timeline(Path({str(path)!r})).add(ENTRIES[0])
"""
    killed = subprocess.run([sys.executable, "-c", code], check=False)

    assert killed.returncode == -signal.SIGKILL
    assert path.read_bytes() == lines(ENOUGH)
    Timeline(path).add(ENTRIES[0])
    assert len(read_timeline(path)) < ENOUGH


def test_where_it_cannot_be_thinned_it_grows_and_this_is_said_once(tmp_path: Path, caplog) -> None:
    path = tmp_path / "rank-0.jsonl"
    timeline = Timeline(path)
    timeline.add(ENTRIES[0])
    with path.open("ab") as file:
        file.write(lines(ENOUGH))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (1000, limits[1])
    )  # nothing of more than 1000 bytes can be written
    try:
        timeline.add(ENTRIES[0])
        timeline.add(ENTRIES[0])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    assert len(read_timeline(path)) == ENOUGH + 1
    assert caplog.text.count("could not be thinned (File too large): it will keep growing") == 1
    assert sorted(os.listdir(tmp_path)) == ["rank-0.cut-off", "rank-0.jsonl"]
    timeline.add(ENTRIES[0])
    assert len(read_timeline(path)) == ENOUGH + 4
    assert os.listdir(tmp_path) == ["rank-0.jsonl"]
