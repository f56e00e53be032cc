"""What tests start ends with them, and a launch that would wait for ever fails instead."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests import processes
from tests.distributed.launched import torchrun

HANGS = """
import os, sys
with open(sys.argv[1], "w") as here:
    here.write(f"{os.getpid()} ")
open(sys.argv[2]).read()  # nobody ever writes into it
"""


def runs(pid: int) -> bool:
    """Whether there is such a process, and not only what its parent has not asked about yet."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_no_rank_outlives_a_launcher_that_hangs(tmp_path: Path) -> None:
    here, never = tmp_path / "here", tmp_path / "never"
    os.mkfifo(here)
    os.mkfifo(never)
    (tmp_path / "hangs.py").write_text(HANGS)
    launcher = processes.start([*torchrun(2), tmp_path / "hangs.py", here, never])
    ranks: list[int] = []
    while len(ranks) < 2:
        ranks += map(int, here.read_text().split())
    assert all(os.getpgid(rank) != os.getpgid(launcher.pid) for rank in ranks), (
        "its group is not all of it"
    )

    with pytest.raises(subprocess.TimeoutExpired):
        processes.end(launcher, timeout=0)

    assert launcher.returncode is not None
    assert not any(map(runs, ranks))


def test_what_a_command_left_behind_ends_and_what_it_printed_is_there() -> None:
    code = "import subprocess; print(subprocess.Popen(['sleep', 'infinity'], start_new_session=True).pid)"
    done = processes.run([sys.executable, "-c", code])

    assert done.returncode == 0
    assert not runs(int(done.stdout))


def test_a_launch_that_would_wait_on_a_lock_says_so(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    lock = tmp_path / "cpu" / "cpu_adam" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    environ = {**os.environ, "TORCH_EXTENSIONS_DIR": str(tmp_path)}
    code = "from tests.distributed.launched import start; start(['true'], None)"
    done = processes.run(
        [sys.executable, "-c", code], environ=environ, cwd=Path(__file__).parent.parent
    )

    assert done.returncode == 1
    assert "[extension-lock]" in done.stderr
    assert str(lock) in done.stderr
