"""The command, as a user calls it."""

import subprocess
import sys
from pathlib import Path

from tests.test_timeline import ENTRIES
from trainer_plugins import __version__
from trainer_plugins.record.timeline import Timeline


def command(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "trainer_plugins", *map(str, arguments)],
        check=False,
        capture_output=True,
        text=True,
    )


def test_the_report_of_a_run(tmp_path: Path) -> None:
    for rank in (0, 1):
        timeline = Timeline(tmp_path / "memory" / f"rank-{rank}.jsonl")
        for entry in ENTRIES:
            timeline.add(entry)

    (tmp_path / "memory" / "rank-0-old.jsonl").write_text("a user's copy")

    done = command("report", tmp_path)

    assert done.returncode == 0, done.stderr
    assert done.stdout.count("cuda:0") == 2
    assert "55%" in done.stdout
    assert "rank 1: 1 releases gave back 0.0 MiB and took 250.0 ms" in done.stdout
    assert "rank 0, step 2: [x] s (e" in done.stdout
    assert str(tmp_path / "memory" / "rank-1.jsonl") in done.stdout.replace("\n", "")


def test_a_folder_without_a_run_is_bad_input(tmp_path: Path) -> None:
    done = command("report", tmp_path)

    assert done.returncode == 2
    assert "give the output_dir of a run that had" in done.stderr.replace("\n", " ").replace(
        "│", ""
    )


def test_the_version() -> None:
    assert command("--version").stdout == f"trainer-plugins {__version__}\n"
