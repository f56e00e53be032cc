"""The timeline keeps what happened, whatever happens to the disk."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainer_plugins.finding import Finding, Severity
from trainer_plugins.reading import MemoryReading
from trainer_plugins.record.timeline import (
    Entry,
    Flush,
    Remark,
    Sample,
    Timeline,
    read_timeline,
    timeline_of_run,
)

READING = MemoryReading(
    device="cuda:0",
    total_bytes=100,
    free_bytes=40,
    reserved_bytes=50,
    allocated_bytes=30,
    peak_allocated_bytes=45,
    num_alloc_retries=2,
)
ENTRIES: list[Entry] = [
    Sample(step=1, moment="train", reading=READING, time_seconds=12.5),
    Flush(
        step=1, reason="interval", released_bytes=20, stuck_bytes=1, seconds=0.25, time_seconds=13.0
    ),
    Remark(
        step=2,
        time_seconds=14.0,
        finding=Finding(
            code="x",
            severity=Severity.ERROR,
            summary="s",
            evidence='e "quoted"\n',
            remedy="r",
            amount=3.5,
        ),
    ),
]


def test_the_parts_of_a_reading_make_the_whole() -> None:
    parts = (
        READING.non_torch_bytes
        + READING.allocated_bytes
        + READING.cached_bytes
        + READING.free_bytes
    )

    assert parts == READING.total_bytes
    assert READING.pressure == 0.55  # peak 45 + non-torch 10; the cache is left out
    assert READING.headroom_bytes == 45


def test_what_is_written_is_read_back_the_same(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "_trainer_plugins" / "memory" / "rank-0.jsonl")
    for entry in ENTRIES:
        timeline.add(entry)

    assert (
        read_timeline(tmp_path / "_trainer_plugins" / "memory" / "rank-0.jsonl")
        == ENTRIES
        == list(timeline)
    )


def test_a_second_run_goes_on_behind_the_first(tmp_path: Path) -> None:
    for entry in ENTRIES:
        timeline = Timeline(tmp_path / "rank-0.jsonl")
        timeline.add(entry)
        timeline.close()

    assert read_timeline(tmp_path / "rank-0.jsonl") == ENTRIES


def test_memory_is_bounded(tmp_path: Path) -> None:
    timeline = Timeline(capacity=2)
    for entry in ENTRIES:
        timeline.add(entry)

    assert list(timeline) == ENTRIES[1:]
    with pytest.raises(ValueError, match="at least one entry, got capacity=0"):
        Timeline(capacity=0)


def test_one_run_has_one_timeline_a_rank(tmp_path: Path) -> None:
    first = timeline_of_run(str(tmp_path), 0)

    assert timeline_of_run(str(tmp_path), 0) is first
    assert timeline_of_run(str(tmp_path), 1) is not first
    assert first.path == tmp_path / "_trainer_plugins" / "memory" / "rank-0.jsonl"


def test_a_folder_that_cannot_be_made_is_said_once_and_harms_nothing(
    tmp_path: Path, caplog
) -> None:
    (tmp_path / "_trainer_plugins").write_text("a user's file")
    timeline = Timeline(tmp_path / "_trainer_plugins" / "memory" / "rank-0.jsonl")
    for entry in ENTRIES:
        timeline.add(entry)

    assert list(timeline) == ENTRIES
    assert (tmp_path / "_trainer_plugins").read_text() == "a user's file"
    (record,) = caplog.records
    assert "set output_dir to a writable folder" in record.message


def on_a_full_disk(path: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Write into a file that may not grow past some bytes: that ends in the middle of a line, as a disk does."""
    prelude = f"""
import resource, sys
sys.path.insert(0, {str(Path(__file__).parent.parent)!r})
from pathlib import Path
from tests.test_timeline import ENTRIES
from trainer_plugins.record.timeline import Timeline
path = Path({str(path)!r})
def limit(num_bytes): resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))
"""
    command = [sys.executable, "-c", prelude + code]
    return subprocess.run(command, check=True, capture_output=True, text=True)


def test_a_full_disk_loses_no_line_and_breaks_none(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.jsonl"
    code = """
timeline = Timeline(path)
limit(300)
for entry in ENTRIES: timeline.add(entry)
print(path.stat().st_size)
limit(resource.RLIM_INFINITY)
for entry in ENTRIES: timeline.add(entry)
"""
    done = on_a_full_disk(path, code)

    assert done.stdout.strip() == "300"  # it really was cut in the middle
    assert done.stderr.count("could not be written") == 1
    assert read_timeline(path) == ENTRIES * 2


def test_a_file_put_in_its_place_is_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.jsonl"
    timeline = Timeline(path)
    timeline.add(ENTRIES[0])
    (tmp_path / "copy").write_bytes(path.read_bytes())
    os.replace(tmp_path / "copy", path)  # as an editor saves
    timeline.add(ENTRIES[1])

    assert read_timeline(path) == ENTRIES[:2]


def test_what_a_full_disk_refuses_is_kept_as_long_as_what_is_in_memory(tmp_path: Path) -> None:
    # The first line is cut in the middle, and given up when a third comes: two are kept.
    path = tmp_path / "rank-0.jsonl"
    code = """
timeline = Timeline(path, capacity=2)
limit(100)
for entry in ENTRIES * 2: timeline.add(entry)
assert path.stat().st_size == 100
limit(resource.RLIM_INFINITY)
timeline.add(ENTRIES[0])
"""
    on_a_full_disk(path, code)

    assert read_timeline(path) == [ENTRIES[2], ENTRIES[0]]
