"""Two real processes: where one rank does something alone, the other is never waited for."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.all

ROOT = Path(__file__).parent.parent.parent
SCRIPT = Path(__file__).with_name("one_rank_alone.py")

# Who has callbacks / who evaluates.
STORIES = [
    *(
        f"{given} / {evaluates}"
        for given in ("all", "rank 0")
        for evaluates in ("all", "rank 0", "fails")
    ),
    "rank 1 / rank 0",
    "another order / rank 0",
    "a tracker on one / rank 0",
    "another interval / rank 0",
    "given twice on one / rank 0",
]
NOBODY = {
    "rank 0": "is on 1 of 2 ranks",
    "rank 1": "is on 1 of 2 ranks",
    "another order": "in the same order",
}


def test_nobody_waits_for_a_rank_that_may_not_come(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
    }
    done = subprocess.run(
        [sys.executable, SCRIPT, tmp_path, json.dumps(STORIES)],
        check=False, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=1800,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    runs = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [run["story"] for run in runs] == STORIES

    for run in runs:
        given, _, evaluates = run["story"].partition(" / ")
        said = "\n".join(run["said"])
        assert not run["is_hanging"], (run["story"], said)
        assert "could not agree" not in said, (run["story"], said)
        if evaluates == "fails":  # and rank 1 ends with the words of its own, as without callbacks
            assert run["codes"][1] == 1, (run["story"], said)
            assert "no such benchmark on this rank" in run["said"][1], (run["story"], said)
        else:
            assert run["codes"] == [0, 0], (run["story"], said)
            assert run["steps"] == [[8, 8], [8, 8]], (run["story"], said)
        if given in NOBODY and evaluates != "fails":
            assert NOBODY[given] in said, (run["story"], said)
        if given == "all":
            assert "Give every rank" not in said, (run["story"], said)
