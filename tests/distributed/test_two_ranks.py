"""Two real processes: what one of them sees, both act on, at the same step, or neither."""

import json
import os
import re
import sys
from pathlib import Path

import pytest

from tests import processes
from tests.distributed.launched import torchrun
from tests.written import read_entries
from trainer_plugins.record.timeline import Flush, Sample
from trainer_plugins.testing import simgpu

ROOT = Path(__file__).parent.parent.parent
SCRIPT = Path(__file__).with_name("two_ranks.py")


def launch(tmp_path: Path, story: str, device: str, launcher: str) -> tuple[list[dict], list[list]]:
    """The facts that each rank wrote, and its timeline."""
    if launcher == "torchrun":
        command = torchrun(2)
    else:
        words = ["--num_processes", "2", "--main_process_port", processes.free_port()]
        command = [sys.executable, "-m", "accelerate.commands.launch", *words, "--multi_gpu"]
    if device == "simgpu":
        if (reason := simgpu.unavailable_reason()) is not None:
            pytest.skip(reason)
        command += ["-m", "trainer_plugins.testing.simgpu", "--capacity", "256MiB"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = processes.run([*command, SCRIPT, tmp_path, story], cwd=tmp_path, environ=environ)
    assert done.returncode == 0, done.stderr[-3000:]
    facts = [json.loads((tmp_path / f"facts-{rank}.json").read_text()) for rank in (0, 1)]
    timelines = [read_entries(tmp_path, rank=rank) for rank in (0, 1)]
    for fact in facts:
        assert fact["world_size"] == 2
        assert fact["model"] == "DistributedDataParallel"
        assert fact["device"] == device
        assert fact["answer_without_rank_1"] is None  # it came back, within its second
    assert facts[0]["weights"] == facts[1]["weights"]
    return facts, timelines


def flush_steps(timeline: list) -> list[int]:
    return [entry.step for entry in timeline if isinstance(entry, Flush)]


def peak_bytes(tmp_path: Path, rank: int) -> int:
    """What this rank gave Prometheus."""
    text = (tmp_path / "prometheus" / f"trainer_plugins-rank-{rank}.prom").read_text()
    (value,) = re.findall(
        rf'^trainer_plugins_memory_peak_bytes{{rank="{rank}",.*}} (\d+)$', text, re.MULTILINE
    )
    return int(value)


def test_what_one_rank_caches_both_release(tmp_path: Path) -> None:
    facts, (first, second) = launch(tmp_path, "release", "simgpu", "torchrun")

    assert flush_steps(first) == flush_steps(second)
    assert {2, 4, 6, 8} <= set(flush_steps(first))
    assert sum(e.released_bytes for e in second if isinstance(e, Flush)) >= 4 * 64 << 20
    assert (
        sum(e.released_bytes for e in first if isinstance(e, Flush)) < 64 << 20
    )  # rank 0 had nothing to gain
    assert [fact["step"] for fact in facts] == [8, 8]
    peaks = [peak_bytes(tmp_path, rank) for rank in (0, 1)]
    assert peaks[0] < 64 << 20 <= peaks[1]


@pytest.mark.all
def test_what_one_rank_holds_both_hold(tmp_path: Path) -> None:
    _, (first, second) = launch(tmp_path, "hold", "simgpu", "accelerate")

    assert flush_steps(first) == flush_steps(second) == [2]


@pytest.mark.all
def test_after_an_evaluation_on_one_rank_both_release_where_both_come(tmp_path: Path) -> None:
    _, timelines = launch(tmp_path, "evaluate", "simgpu", "torchrun")

    for timeline in timelines:
        (release,) = [entry for entry in timeline if isinstance(entry, Flush)]
        assert (release.step, release.reason) == (10, "after eval")
    assert [
        sum(e.released_bytes for e in t if isinstance(e, Flush)) >= 64 << 20 for t in timelines
    ] == [False, True]


@pytest.mark.all
def test_where_one_rank_must_stop_both_stop(tmp_path: Path) -> None:
    facts, (first, second) = launch(tmp_path, "stop", "simgpu", "torchrun")

    assert [fact["step"] for fact in facts] == [4, 4]
    assert (tmp_path / "checkpoint-4" / "trainer_state.json").is_file()
    assert max(e.step for e in first if isinstance(e, Sample)) == 4 == max(e.step for e in second)


def test_two_ranks_on_the_cpu(tmp_path: Path) -> None:
    _, timelines = launch(tmp_path, "release", "cpu", "torchrun")

    assert all(
        {e.reading.device for e in timeline if isinstance(e, Sample)} == {"cpu"}
        for timeline in timelines
    )
