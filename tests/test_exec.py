"""trainer-plugins exec: any command, and every Trainer that some Python under it builds has callbacks."""

import ast
import importlib
import json
import os
import select
import signal
import subprocess
import sys
from functools import partial
from glob import glob
from pathlib import Path

import pytest

from tests import processes
from tests.offers import install_transformers
from tests.written import read_steps
from trainer_plugins._site.trainer_plugins_on_import import call_when_imported

ROOT = Path(__file__).parent.parent
SCRIPT = """
import json, os, pathlib, sys
import torch.distributed as dist
from transformers import Trainer, TrainingArguments
from tests.models import tiny_llama, token_rows
args = TrainingArguments("out", max_steps=4, report_to="none", save_strategy="no", use_cpu=True)
trainer = Trainer(tiny_llama(), args, train_dataset=token_rows())
trainer.train()
facts = {"world_size": dist.get_world_size(), "model": type(trainer.model_wrapped).__name__}
pathlib.Path(f"facts-{dist.get_rank()}.json").write_text(json.dumps(facts))
sys.stdout.flush()
os._exit(0)  # gloo now and then aborts a process at its end
"""


OBSERVE = ("--preset", "observe")
"""It sets nothing, and so says nothing."""

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2")
SIMGPU = ("-m", "trainer_plugins.testing.simgpu", "--capacity", "3MiB", "train.py")
TOO_MANY = "per_device_train_batch_size=64"
SHOWS_ENVIRON = "import json, os; print(json.dumps(dict(os.environ)))"

NOTHING = "trainer-plugins exec: nothing was protected: no Trainer reported from this command. "


def execute(*arguments: object, cwd: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "trainer_plugins", "exec", *map(str, arguments)]
    path = os.pathsep.join(filter(None, [environ.pop("path", None), str(ROOT)]))
    return processes.run(command, cwd=cwd, environ={**os.environ, "PYTHONPATH": path, **environ})


def write_small(folder: Path, sizes: str, trains: str) -> None:
    """Write a script that trains, and ends when it has."""
    text = SCRIPT[: SCRIPT.index("facts =")].replace("use_cpu=True", sizes)
    text = text.replace("trainer.train()", trains)
    (folder / "train.py").write_text(f"from contextlib import suppress{text}")


def test_two_that_wait_for_one_module_are_both_called() -> None:
    """The dry card and `exec` both wait for the Trainer's."""
    called: list[str] = []
    sys.modules.pop("tabnanny", None)
    for name in ("dry card", "exec"):
        call_when_imported("tabnanny", partial(called.append, name))
    assert importlib.import_module("tabnanny").__name__ == "tabnanny"
    assert sorted(called) == ["dry card", "exec"]


@pytest.mark.all
def test_two_ranks_of_torchrun(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    launch = (*TORCHRUN, "--master-port", processes.free_port(), "train.py")

    done = execute(*OBSERVE, "--memory-every-steps", "2", "--", *launch, cwd=tmp_path)

    assert done.returncode == 0, done.stderr[-3000:]
    for rank in (0, 1):
        facts = json.loads((tmp_path / f"facts-{rank}.json").read_text())
        assert facts == {"world_size": 2, "model": "DistributedDataParallel"}
        assert read_steps(tmp_path / "out", rank=rank) == [2, 4]
    assert NOTHING not in done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {
        "train.py",
        "out",
        "facts-0.json",
        "facts-1.json",
    }


WITH_WORKERS = """
import multiprocessing
from transformers import Trainer, TrainingArguments
import trainer_plugins
from tests.models import tiny_llama
if __name__ == "__main__":
    trainer_plugins.attach("observe")
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(abs, [-1]))
    trainer = Trainer(tiny_llama(), TrainingArguments("out", report_to="none", use_cpu=True))
    print([type(callback).__name__ for callback in trainer.callback_handler.callbacks])
"""


@pytest.mark.all
def test_what_the_program_attaches_counts_more_and_its_workers_are_silent(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(WITH_WORKERS)

    done = execute("--", sys.executable, "own.py", cwd=tmp_path)

    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[0] == "[1]"
    assert "'StrategyInForce', 'Preflight', 'MemoryWatchdog', 'OOMReporter'" in done.stdout
    assert "KVCacheGuard" not in done.stdout
    assert NOTHING not in done.stderr


@pytest.mark.skipif(bool(glob("/dev/nvidia[0-9]*")), reason="there is a card")
def test_fit_asks_for_the_card_where_there_is_none_and_starts_nothing(tmp_path: Path) -> None:
    started = tmp_path / "started"
    for fit in ("--fit", "--fit=ask"):
        done = execute(fit, "--", "touch", started, cwd=tmp_path)
        assert done.returncode == 2
        assert "name the card with --gpu: no NVIDIA driver; nothing was started" in done.stderr
        assert not started.exists()
    done = execute("--gpu", "24GiB", "--", "touch", started, cwd=tmp_path)
    assert done.returncode == 2
    fit = "--gpu, --num-gpus, --may, --allow-writes and --allow-network need --fit"
    assert fit in done.stderr
    assert not started.exists()


SHOWS = "import json, os, sys; print(json.dumps([dict(os.environ), sorted(sys.modules)]))"


def test_only_what_the_preset_needs_is_set_and_is_said_in_one_line(tmp_path: Path) -> None:
    before = {name: value for name, value in os.environ.items() if not name.endswith("ALLOC_CONF")}
    launch = ["trainer_plugins", "exec", "--memory-stop", "--", sys.executable, "-c", SHOWS]

    done = execute(
        "--preset", "observe", "--", sys.executable, "-m", *launch, cwd=tmp_path, path="mine"
    )

    environ, modules = json.loads(done.stdout)
    hook = {"PYTHONPATH", "TRAINER_PLUGINS_ATTACH", "TRAINER_PLUGINS_EXEC"}
    (setting,) = [name for name in environ if name.endswith("ALLOC_CONF")]
    new = {name: value for name, value in environ.items() if before.get(name) != value}
    assert new.keys() - {"STARTED_BY_A_TEST", "LC_CTYPE"} == {*hook, setting}
    assert done.stderr.startswith(f"trainer-plugins exec sets {setting}={environ[setting]}: ")
    assert done.stderr.count(NOTHING) == 1  # the one around it leaves that to the inner one
    assert done.stderr.count("\n") == 2  # observe, around it, has set nothing
    assert json.loads(environ["TRAINER_PLUGINS_ATTACH"]) == {"stop": True}
    assert environ["PYTHONPATH"].split(os.pathsep)[1:] == ["mine", str(ROOT)]
    assert "trainer_plugins_on_import" in modules
    assert not {"trainer_plugins", "typing", "transformers"} & set(
        modules
    )  # a start of Python stays cheap
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("flags", "words", "is_expandable"),
    [
        ((), ("--use_vllm", "True"), False),
        ((), ("use_vllm=true", "vllm_mode=colocate"), False),
        ((), ("--use-vllm", "--vllm-mode=server"), True),
        ((), ("--use_vllm", "False"), True),
        (("--vllm", "--preset", "observe"), (), False),
        ((), (), True),
    ],
)
@pytest.mark.all(but=2)
def test_expandable_segments_stay_off_beside_vllm(tmp_path: Path, flags, words, is_expandable):
    done = execute(*flags, "--", sys.executable, "-c", SHOWS_ENVIRON, *words, cwd=tmp_path)

    environ = json.loads(done.stdout)
    asked = [text for name, text in environ.items() if name.endswith("ALLOC_CONF")]
    assert asked == (["expandable_segments:True"] if is_expandable else [])
    assert "TRAINER_PLUGINS_ATTACH" in environ


def test_variables_in_front_of_a_pasted_command_are_set(tmp_path: Path) -> None:
    """And known before our own are chosen; what looks alike behind the program is its own."""
    setting = "PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:64"
    program = (sys.executable, "-c", SHOWS_ENVIRON, "B=1")

    done = execute("--", setting, "MINE=a=b", *program, cwd=tmp_path)

    environ = json.loads(done.stdout)
    asked = {text for name, text in environ.items() if name.endswith("ALLOC_CONF")}
    assert asked == {"max_split_size_mb:64"}
    assert environ["MINE"] == "a=b"
    assert "B" not in environ


@pytest.mark.parametrize(
    ("ends", "code"), [("exit 7", 7), ("kill -9 $$", -9), ("kill -11 $$", -11)]
)
def test_the_exit_code_is_that_of_the_command(tmp_path: Path, ends: str, code: int) -> None:
    assert execute("sh", "-c", ends, cwd=tmp_path).returncode == code


TRAPS = "trap 'echo got; kill $!; exit 3' {}; sleep 1000 & echo ready; wait"


@pytest.mark.parametrize("name", ["TERM", "INT", "USR1", "HUP"])
@pytest.mark.all(but=2)
def test_a_signal_for_exec_reaches_the_command_once(tmp_path: Path, name: str) -> None:
    call = [sys.executable, "-m", "trainer_plugins", "exec", *OBSERVE, "sh", "-c"]
    process = processes.start([*call, TRAPS.format(name)], cwd=tmp_path, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    process.send_signal(getattr(signal, f"SIG{name}"))
    assert process.stdout.read() == b"got\n"
    assert processes.end(process) == [3]


def test_a_command_dies_with_an_exec_that_is_killed(tmp_path: Path) -> None:
    code = "import os; print(os.getpid(), flush=True); os.read(0, 1)"
    call = [sys.executable, "-m", "trainer_plugins", "exec", sys.executable, "-c", code]
    pipe = subprocess.PIPE
    process = processes.start(call, cwd=tmp_path, stdin=pipe, stdout=pipe)
    assert process.stdout is not None
    child = os.pidfd_open(int(process.stdout.readline()))
    process.kill()
    assert select.select([child], [], [], processes.ENDS_A_HANG)[0] == [child]
    os.close(child)
    processes.end(process)


def test_the_users_own_sitecustomize_is_read(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.path.append('theirs')\n")
    code = "import sys, sitecustomize; print(sys.path[1], sys.path[-1], sitecustomize.__file__)"

    done = execute("--", sys.executable, "-c", code, cwd=tmp_path, path=str(tmp_path))

    assert (
        done.stdout
        == f"{ROOT / 'trainer_plugins' / '_site'} theirs {tmp_path / 'sitecustomize.py'}\n"
    )


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
    ],
)
def test_what_the_users_own_sitecustomize_raises_python_reports(tmp_path, text, error) -> None:
    (tmp_path / "sitecustomize.py").write_text(text)

    done = execute(
        *OBSERVE, "--", sys.executable, "-c", "print('went on')", cwd=tmp_path, path=str(tmp_path)
    )

    assert (done.returncode, done.stdout) == (0, "went on\n")
    reported = f"Error in sitecustomize; set PYTHONVERBOSE for traceback:\n{error}\n"
    assert done.stderr.startswith(reported * 2 + NOTHING)  # in our own Python, and under it


IMPORTS = "import transformers.trainer; print('went on')"


@pytest.mark.parametrize(
    ("version", "says"),
    [
        ("99.0", f"{NOTHING}The program imported transformers.Trainer but built none"),
        ("4.45.1", "works with transformers 4.57.1 or newer, but this is 4.45.1"),
    ],
)
def test_what_was_not_attached_is_said_in_the_end(tmp_path, version, says) -> None:
    folder = install_transformers(tmp_path, version)

    done = execute(*OBSERVE, "--", sys.executable, "-c", IMPORTS, cwd=tmp_path, path=folder)

    assert (done.returncode, done.stdout) == (0, "went on\n")
    assert says in done.stderr
    assert done.stderr.splitlines()[-1].startswith(NOTHING)
    assert done.stderr.count("\n") == 1 + (version != "99.0")


CODE = "import transformers.trainer; print(1 / 0)"


@pytest.mark.parametrize(
    "command",
    [
        ["env", "-i", sys.executable, "-c", "print(1 / 0)"],
        ["env", f"PYTHONPATH={ROOT}", sys.executable, "-c", CODE],
        ["env", "-u", "PYTHONPATH", sys.executable, "-c", "1 / 0"],
        [sys.executable, "-I", "-c", "1 / 0"],
        [sys.executable, "-c", "print(1 / 0)"],  # without transformers, and it dies
        ["sh", "-c", f"unset PYTHONPATH; {sys.executable} -c 1/0; exit 1"],
        ["sh", "-c", "exit 1"],
    ],
    ids=" ".join,
)
@pytest.mark.all(but=2)
def test_a_run_that_lost_the_hook_is_told_so_however_it_ends(tmp_path: Path, command) -> None:
    """Its programs may be anything: what counts is that none of them has reported."""
    (tmp_path / "transformers").mkdir()
    (tmp_path / "transformers" / "__init__.py").write_text("")
    (tmp_path / "transformers" / "trainer.py").write_text("")

    done = execute(
        *OBSERVE, "--", *command, cwd=tmp_path, TRAINER_PLUGINS_CACHE=str(tmp_path / "c")
    )

    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(f"{NOTHING}Either the program builds no Trainer")
    assert "env -i" in done.stderr
    assert [*(tmp_path / "c" / "exec").iterdir()] == []


@pytest.mark.all(unless=lambda caught: not caught)
@pytest.mark.slow
@pytest.mark.parametrize("caught", ["", "with suppress(RuntimeError): "])
def test_a_run_that_dies_of_memory_ends_with_its_explanation(tmp_path: Path, caught: str) -> None:
    """Of two ranks that both fail, one; a program that goes on has none."""
    write_small(tmp_path, TOO_MANY, f"{caught}trainer.train()")

    launcher = (sys.executable,) if caught else TORCHRUN
    done = execute(*OBSERVE, "--", *launcher, *SIMGPU, cwd=tmp_path)

    records = [*(tmp_path / "out" / "_trainer_plugins").glob("oom-rank*.json")]
    assert len(records) == (1 if caught else 2), done.stderr
    lines = done.stderr.splitlines()
    assert sum(line.startswith("Cause  ") for line in lines) == (not caught)
    assert sum(line.startswith("Try    ") for line in lines) == (not caught)
    assert (done.returncode == 0) == bool(caught)


LAST = """
import select, signal
from transformers import TrainerCallback
class Last(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        pids = [None, None]
        dist.all_gather_object(pids, os.getpid())
        if args.process_index == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            select.select([os.pidfd_open(pids[1])], [], [])
trainer.add_callback(Last)
trainer.train()"""


@pytest.mark.all
@pytest.mark.slow
def test_where_the_highest_rank_ends_first_it_alone_explains(tmp_path: Path) -> None:
    write_small(tmp_path, f"ddp_broadcast_buffers=False, {TOO_MANY}", LAST)

    done = execute(*OBSERVE, "--", *TORCHRUN, *SIMGPU, cwd=tmp_path)

    records = sorted((tmp_path / "out" / "_trainer_plugins").glob("oom-rank*.json"))
    assert len(records) == 2, done.stderr
    assert records[0].stat().st_mtime > records[1].stat().st_mtime
    assert sum(line.startswith("Cause  ") for line in done.stderr.splitlines()) == 1, done.stderr


@pytest.mark.all
@pytest.mark.slow
def test_a_run_that_dies_of_something_else_is_not_explained_by_an_earlier_oom(
    tmp_path: Path,
) -> None:
    write_small(tmp_path, TOO_MANY, "with suppress(RuntimeError): trainer.train()\n1 / 0")

    done = execute(*OBSERVE, "--", sys.executable, *SIMGPU, cwd=tmp_path)

    assert (tmp_path / "out" / "_trainer_plugins" / "oom-rank0.json").exists(), done.stderr
    assert "ZeroDivisionError: division by zero" in done.stderr
    assert "Cause  " not in done.stderr


def test_a_warning_of_an_import_keeps_the_line_that_imports(tmp_path: Path) -> None:
    (tmp_path / "transformers").mkdir()
    (tmp_path / "transformers" / "__init__.py").write_text("")
    text = "import warnings\nwarnings.warn('of the past', FutureWarning, stacklevel=2)\n"
    (tmp_path / "transformers" / "trainer.py").write_text(text)
    (tmp_path / "train.py").write_text("import sys\nimport transformers.trainer\n")

    done = execute("--", sys.executable, "train.py", cwd=tmp_path)

    assert f"{tmp_path / 'train.py'}:2: FutureWarning: of the past" in done.stderr


def test_a_python_that_does_not_have_the_pack(tmp_path: Path) -> None:
    folder = install_transformers(tmp_path, "99.0")
    code = f"import sys; sys.modules['trainer_plugins'] = None\n{IMPORTS}"

    done = execute(*OBSERVE, "--", sys.executable, "-c", code, cwd=tmp_path, path=folder)

    assert (done.returncode, done.stdout) == (0, "went on\n")
    first, last = done.stderr.splitlines()
    assert f"nothing was attached in this Python ({sys.executable}): " in first
    assert first.endswith("; install trainer-plugins in it, too")
    assert last.startswith(NOTHING)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "name a command after --"),
        (["--"], "name a command after --"),
        (["--memory-stopp", "--", "true"], "--memory-stop"),
        (["--preset", "surviv", "--", "true"], "Did you mean survive?"),
        (["--memory-warn-fraction", "0.98", "--", "true"], "0.98 and 0.97"),
    ],
)
@pytest.mark.all(but=2)
def test_bad_input_is_one_line(tmp_path: Path, arguments, says) -> None:
    done = execute(*arguments, cwd=tmp_path)

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("trainer-plugins exec: ")
    assert says in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("command", "exit_code", "says"),
    [
        ("no-such-command", 127, "cannot run no-such-command: No such file or directory"),
        ("./no-such-file", 127, "cannot run ./no-such-file: No such file or directory"),
        ("./not-executable", 126, "cannot run ./not-executable: Permission denied"),
        ("./no-program", 126, "cannot run ./no-program: Exec format error"),
        (".", 126, "cannot run .: Permission denied"),
    ],
)
@pytest.mark.all(but=2)
def test_a_command_that_cannot_be_run_ends_as_in_a_shell(
    tmp_path: Path, command, exit_code, says
) -> None:
    (tmp_path / "not-executable").write_text("#!/bin/sh\n")
    (tmp_path / "no-program").write_bytes(b"\0\0")
    (tmp_path / "no-program").chmod(0o755)

    done = execute(*OBSERVE, "--", command, cwd=tmp_path)

    assert (done.returncode, done.stdout, done.stderr) == (
        exit_code,
        "",
        f"trainer-plugins exec: {says}\n",
    )


def test_what_every_python_reads_is_written_for_every_python() -> None:
    tree = ast.parse((ROOT / "trainer_plugins" / "_site" / "sitecustomize.py").read_text())

    newer = (
        ast.JoinedStr,
        ast.AnnAssign,
        ast.AsyncFunctionDef,
        ast.NamedExpr,
        ast.Nonlocal,
        ast.YieldFrom,
    )
    assert not [node.lineno for node in ast.walk(tree) if isinstance(node, newer)]
    for function in [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]:
        assert function.returns is None
        assert not [
            each
            for each in (*function.args.args, *function.args.kwonlyargs)
            if each.annotation is not None
        ]
    assert tree.body


OLD_PYTHONS = sorted(
    str(path)
    for pattern in ("versions/2.7.*/bin/python2.7", "versions/3.[5-9].*/bin/python3")
    for path in (Path.home() / ".pyenv").glob(pattern)
)


@pytest.mark.skipif(not OLD_PYTHONS, reason="no old Python is here")
@pytest.mark.parametrize("python", OLD_PYTHONS)
@pytest.mark.all(but=2)
def test_an_old_python_runs_as_without_us(tmp_path: Path, python: str) -> None:
    (tmp_path / "sitecustomize.py").write_text("import os\nos.environ['SEEN'] = 'theirs'\n")
    code = "import os, sys, sitecustomize; sys.stdout.write(os.environ['SEEN'])"

    done = execute(*OBSERVE, "--", python, "-B", "-c", code, cwd=tmp_path, path=str(tmp_path))

    assert (done.returncode, done.stdout) == (0, "theirs")
    assert done.stderr.startswith(NOTHING)


def test_help_lists_the_options(tmp_path: Path) -> None:
    assert "--memory-min-reclaimable-fraction" in execute("--help", cwd=tmp_path).stdout


def test_a_word_of_the_command_is_not_taken_for_ours(tmp_path: Path) -> None:
    program = "import sys; print(sys.argv[1:])"
    done = execute(*OBSERVE, "--", sys.executable, "-c", program, "--fit=ask", cwd=tmp_path)
    assert done.stdout == "['--fit=ask']\n", done.stderr
