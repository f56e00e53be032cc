"""What tests start ends with them, and a launch that would wait for ever fails instead."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils import cpp_extension

from tests import processes
from tests.distributed.launched import torchrun
from tests.test_forks import is_alive

HANGS = """
import os, sys
with open(sys.argv[1], "w") as here:
    here.write(f"{os.getpid()} ")
open(sys.argv[2]).read()  # nobody ever writes into it
"""


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
    assert not any(map(is_alive, ranks))


def test_what_a_command_left_behind_ends_and_what_it_printed_is_there() -> None:
    code = "import subprocess; print(subprocess.Popen(['sleep', 'infinity'], start_new_session=True).pid)"
    done = processes.run([sys.executable, "-c", code])

    assert done.returncode == 0
    assert not is_alive(int(done.stdout))


def test_a_launch_that_would_wait_on_a_lock_says_so(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    if "FileBaton(" not in Path(cpp_extension.__file__).read_text():
        pytest.skip("this torch locks the file itself, and leaves no trap (pytorch#190543)")
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


TELLS = """
import json, os, sys
json.dump({"argv": sys.argv, "path": sys.path[0], "folder": os.getcwd(), "main": __name__,
           "set": os.environ.get("SET"), "stdin": sys.stdin.read(),
           "torch": "torch" in sys.modules, "python": sys.executable}, sys.stdout)
sys.stderr.write("said")
sys.exit(5)
"""


@pytest.mark.parametrize("how", ["script", "module", "code"])
def test_a_fork_is_what_a_new_python_would_be(tmp_path: Path, how: str) -> None:
    (tmp_path / "tells.py").write_text(TELLS)
    word = {"script": ["tells.py"], "module": ["-m", "tells"], "code": ["-c", TELLS]}[how]
    facts = []
    for fresh in ("", "to compare"):
        done = processes.run(
            [sys.executable, *word, "--flag", "a b"],
            cwd=tmp_path,
            environ={**os.environ, "SET": "yes"},
            stdin=subprocess.DEVNULL,
            fresh=fresh,
        )
        assert (done.returncode, done.stderr) == (5, "said")
        facts.append(json.loads(done.stdout))
    fork, new = facts
    assert (fork.pop("torch"), new.pop("torch")) == (True, False)
    assert (fork.pop("python"), new.pop("python")) == (
        str(processes._relay().python),
        sys.executable,
    )
    assert fork == new
    assert (fork["main"], fork["set"]) == ("__main__", "yes")


def test_a_fork_ends_by_its_signal_and_with_its_shim(tmp_path: Path) -> None:
    code = "import os, signal; os.kill(os.getpid(), signal.{})"
    for name in ("SIGTERM", "SIGKILL"):
        done = processes.run([sys.executable, "-c", code.format(name)])
        assert done.returncode == -getattr(signal, name)
    tells = "import os; print(os.getpid(), flush=True); os.read(int(input()), 1)"
    begun = processes.start(
        [sys.executable, "-c", tells], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert begun.stdout is not None
    fork = int(begun.stdout.readline())
    assert fork != begun.pid
    processes.kill(begun)
    assert not is_alive(fork)


def test_what_imports_would_see_is_a_new_python(tmp_path: Path) -> None:
    """A package that hides another, a variable, an option: in each the server's imports are not those."""
    processes.run([sys.executable, "-c", ""], check=True)  # the first call begins a server
    (tmp_path / "peft").mkdir()
    (tmp_path / "peft" / "__init__.py").write_text("")
    code = "import sys; print('torch' in sys.modules)"
    for options, environ in (
        ([], {"PYTHONPATH": str(tmp_path)}),
        ([], {"TORCH_LOGS": "+dynamo"}),
        (["-O"], {}),
    ):
        call = [sys.executable, *options, "-c", code]
        assert processes.run(call, environ={**os.environ, **environ}).stdout == "False\n"
    with open(__file__) as file:
        call = [sys.executable, "-c", f"{code}; import os; print(os.read({file.fileno()}, 3))"]
        done = processes.run(call, pass_fds=[file.fileno()])
    assert done.stdout == 'False\nb\'"""\'\n'
