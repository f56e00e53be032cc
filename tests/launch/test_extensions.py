"""A build of an extension that was cut off leaves a lock, on which torch waits for ever: who meets it is told first."""

import logging
import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.utils import cpp_extension

from tests import processes
from tests.test_cli import command
from tests.written import read_findings
from trainer_plugins import StrategyInForce, protect
from trainer_plugins.finding import Severity
from trainer_plugins.launch import configs
from trainer_plugins.launch.extensions import ExtensionLock, lock_findings, read_locks

pytestmark = pytest.mark.skipif(
    "FileBaton(" not in Path(cpp_extension.__file__).read_text(),
    reason="this torch locks the file itself, and leaves no trap (pytorch#190543)",
)
ROOT = Path(__file__).parent.parent.parent
BUILD = """
import sys
from torch.utils.cpp_extension import load
load("slow", [sys.argv[1]])
"""
# Answers what torch asks of a compiler, says that it compiles, and does not end before it is told
# to.
COMPILER = """#!/bin/sh
for word in "$@"; do
    [ "$word" != -c ] || { echo compiling > "$BEGAN"; read -r _ < "$ENDS"; exit 1; }
done
exec c++ "$@"
"""


@pytest.fixture
def extensions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "extensions"
    folder.mkdir()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(folder))
    return folder


@pytest.fixture
def left(extensions: Path) -> Path:
    """The lock of a build that was cut off two hours ago."""
    lock = extensions / "cpu_adam" / "lock"
    lock.parent.mkdir()
    lock.touch()
    os.utime(lock, (lock.stat().st_mtime - 7200,) * 2)
    return lock


@pytest.fixture
def building(extensions: Path, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process in the middle of a build by torch."""
    began, ends, compiler, source = (
        tmp_path / name for name in ("began", "ends", "compiler", "slow.cpp")
    )
    os.mkfifo(began)
    os.mkfifo(ends)
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    source.write_text("int one() { return 1; }")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # where ninja is
    environ = {
        **os.environ,
        "CXX": str(compiler),
        "BEGAN": str(began),
        "ENDS": str(ends),
        "PATH": path,
    }
    process = processes.start(
        [sys.executable, "-c", BUILD, source], environ=environ, fresh="its number is asked for"
    )
    try:
        assert began.read_text() == "compiling\n"
        yield process
    finally:
        processes.kill(process)


def test_a_build_that_runs_has_its_lock_and_one_that_was_killed_left_it(
    building, extensions: Path
) -> None:
    (lock,) = read_locks(os.environ)
    assert (lock.path, lock.holder) == (extensions / "slow" / "lock", building.pid)
    assert not list(lock_findings([lock]))

    processes.kill(building)

    (lock,) = read_locks(os.environ)
    assert (lock.path, lock.holder) == (extensions / "slow" / "lock", None)
    for will_need, severity in (((), Severity.WARNING), (("slow",), Severity.ERROR)):
        (finding,) = lock_findings([lock], will_need)
        assert (finding.code, finding.severity) == ("extension-lock", severity)
        assert str(lock.path) in finding.evidence


def test_it_is_said_how_old_it_is_and_what_to_do(tmp_path: Path) -> None:
    lock = tmp_path / "cpu_adam" / "lock"
    (finding,) = lock_findings([ExtensionLock(path=lock, age_seconds=7200)])

    assert str(finding) == (
        "[extension-lock] every launch that needs the torch extension cpu_adam waits forever: a build was interrupted "
        f"({lock} is 2 h old, and no process holds it). Run trainer-plugins configs build cpu_adam, also while ranks "
        f"wait: after rm {lock} they fail with an ImportError"
    )


def test_where_its_owner_cannot_be_seen_no_more_is_said_than_its_age(tmp_path: Path) -> None:
    lock = tmp_path / "cpu_adam" / "lock"
    why = "its folder is on nfs4, which other machines may share"
    (finding,) = lock_findings([ExtensionLock(path=lock, age_seconds=90, unseen=why)])

    assert "it is unknown whether a process is building it now" in finding.summary
    assert finding.evidence == f"{lock} is 90 s old; {why}"
    assert f"fuser -v {lock}" in finding.remedy


def test_the_folder_is_that_of_this_python(left: Path, tmp_path: Path) -> None:
    tag = f"py{sys.version_info.major}{sys.version_info.minor}{sys.abiflags}"
    ours, others = (
        tmp_path / "torch_extensions" / f"{python}_cu128" / "one" for python in (tag, "py20")
    )
    for folder in (ours, others):
        folder.mkdir(parents=True)
        (folder / "lock").touch()

    assert [lock.path for lock in read_locks({"XDG_CACHE_HOME": str(tmp_path)})] == [ours / "lock"]
    assert [
        lock.path for lock in read_locks({"TORCH_EXTENSIONS_DIR": str(left.parent.parent)})
    ] == [left]


def test_a_torch_that_locks_the_file_itself_leaves_no_trap(left: Path, tmp_path: Path) -> None:
    """From pytorch#190543 on the file stays, and its existence means nothing."""
    utils = tmp_path / "later" / "torch" / "utils"
    utils.mkdir(parents=True)
    (utils.parent / "__init__.py").touch()
    (utils / "cpp_extension.py").write_text(
        "lock = FileLock(os.path.join(build_directory, 'lock'))"
    )
    code = "import os, trainer_plugins.launch.extensions as e; print(len(e.read_locks(os.environ)))"
    for path, num_locks in (([], 1), ([str(utils.parent.parent)], 0)):
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join([*path, str(ROOT)])}
        done = subprocess.run(
            [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True
        )
        assert int(done.stdout) == num_locks


def test_a_run_of_deepspeed_says_it_when_its_trainer_is_built(
    left: Path, make_trainer, caplog
) -> None:
    caplog.set_level(logging.WARNING, logger="trainer_plugins")
    for _ in range(2):  # as the trials of a search
        make_trainer(StrategyInForce(), max_steps=1).train()
    assert "[extension-lock]" not in caplog.text  # they build nothing

    trainer = make_trainer(max_steps=1)
    trainer.args.deepspeed = {"zero_optimization": {"stage": 2}}
    protect(trainer, "observe")
    said = caplog.text  # DeepSpeed would build, and wait, in train()
    trainer.args.deepspeed = None
    trainer.train()

    assert "[extension-lock]" in said
    assert f"{left} is 2 h old" in said
    assert caplog.text.count("[extension-lock]") == 1
    remarks = read_findings(trainer.args.output_dir)
    assert [finding.code for finding in remarks] == ["extension-lock"]


def test_exec_says_it_and_runs_the_command(left: Path) -> None:
    done = command("exec", "--", sys.executable, "-c", "print('it ran')")

    assert done.stdout == "it ran\n"
    assert "WARNING [extension-lock]" in done.stderr
    assert f"{left} is 2 h old" in done.stderr


@pytest.mark.parametrize(("name", "says"), [("zero3_offload_all", "ERROR"), ("ddp", "WARNING")])
def test_it_is_an_error_of_a_file_that_needs_the_extension(
    left: Path, name: str, says: str
) -> None:
    done = command("configs", "check", configs.path(name))

    assert done.returncode == (says == "ERROR")
    assert f"{says} [extension-lock]" in done.stdout
    assert f"{left} is 2 h old" in done.stdout


# Compiles this in place of any source, which would take minutes.
MODULE = """
#include <Python.h>
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "cpu_adam", 0, -1, 0};
PyMODINIT_FUNC PyInit_cpu_adam(void) { return PyModule_Create(&module); }
"""
QUICK = """#!/bin/sh
output= ; next=
for word in "$@"; do
    [ -z "$next" ] || output=$word
    [ "$word" = -o ] && next=1 || next=
    [ "$word" != -c ] || compiles=1
done
[ "$output" = cpu_adam.o ] || MODULE=/dev/null
[ -z "$compiles" ] || exec c++ -x c++ -c "$MODULE" -o "$output" -MD -MF "$output.d" -fPIC -I"$PYTHON_H"
exec c++ "$@"
"""
WAITS = """
import sys
from torch.utils import cpp_extension
from trainer_plugins.launch.extensions import announce_builds
announce_builds()
wait = cpp_extension.FileBaton.wait
cpp_extension.FileBaton.wait = lambda baton: (sys.stderr.write("it waits\\n"), wait(baton))
cpp_extension.load("cpu_adam", [sys.argv[1]])
print("loaded")
"""


@pytest.mark.parametrize("way_out", ["rm", "build"])
@pytest.mark.all
def test_ranks_that_wait_go_on_after_a_build_and_fail_after_rm(
    left: Path, tmp_path: Path, way_out: str
) -> None:
    pytest.importorskip("deepspeed")
    (source := tmp_path / "module.cpp").write_text(MODULE)
    (compiler := tmp_path / "quick").write_text(QUICK)
    compiler.chmod(0o755)
    environ = {
        **os.environ,
        "CXX": str(compiler),
        "MODULE": str(source),
        "PYTHON_H": sysconfig.get_paths()["include"],
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "DS_ACCELERATOR": "cpu",
    }
    waiting = processes.start(
        [sys.executable, "-c", WAITS, source],
        environ=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        assert waiting.stderr is not None
        said = waiting.stderr.readline().decode()
        assert f"cpu_adam waits forever for {left}" in said
        assert "configs build cpu_adam" in said
        assert waiting.stderr.readline() == b"it waits\n"
        if way_out == "rm":
            left.unlink()
        else:
            words = ["-m", "trainer_plugins", "configs", "build", "cpu_adam"]
            done = subprocess.run(
                [sys.executable, *words], env=environ, capture_output=True, text=True, check=False
            )
            assert (done.returncode, "cpu_adam is built" in done.stdout) == (0, True), done.stderr
            assert not left.exists()
        output, errors = waiting.communicate(timeout=processes.ENDS_A_HANG)
    finally:
        processes.kill(waiting)
    if way_out == "rm":
        assert waiting.returncode == 1
        assert b"ImportError" in errors
    else:
        assert (waiting.returncode, output) == (0, b"loaded\n"), errors


@pytest.mark.parametrize(
    ("words", "exit_code", "said"),
    [
        (["no_such"], 2, "DeepSpeed has no extension no_such"),
        (["none.yaml"], 2, "none.yaml cannot be read"),
        ([configs.path("ddp")], 0, "needs no DeepSpeed extension"),
    ],
)
def test_a_build_of_nothing_says_so(words: list[str], exit_code: int, said: str) -> None:
    pytest.importorskip("deepspeed")
    done = command("configs", "build", *words)

    assert (done.returncode, said in done.stdout + done.stderr) == (exit_code, True), done.stderr


def test_each_first_build_says_what_is_built_and_how_long_it_takes(
    extensions: Path, make_trainer, tmp_path: Path, monkeypatch, capfd
) -> None:
    """As DeepSpeed calls it. The compiler fails at once: it is said before, and only where it takes."""
    compiler, source = tmp_path / "compiler", tmp_path / "one.cpp"
    compiler.write_text('#!/bin/sh\ncase " $* " in *" -c "*) exit 1;; esac\nexec c++ "$@"\n')
    compiler.chmod(0o755)
    source.touch()
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    before = cpp_extension.load
    try:
        for _ in range(2):
            make_trainer(StrategyInForce())
        for name, is_there in (
            *(("cpu_adam", False), ("deepspeed_shm_comm", False), ("mine", False)),
            ("cpu_adam", True),
        ):
            library = extensions / name / f"{name}.so"
            library.parent.mkdir(exist_ok=True)
            library.touch() if is_there else None
            error = (ImportError, "too short") if is_there else (RuntimeError, "Error building")
            with pytest.raises(error[0], match=error[1]):
                cpp_extension.load(name, [str(source)])
    finally:
        cpp_extension.load = before

    takes = "usually one to three minutes on two quiet cores, up to ten on busy ones"
    lines = [line for line in capfd.readouterr().err.splitlines() if "compiles" in line]
    assert lines == [
        "trainer_plugins: torch compiles cpu_adam first (DeepSpeed's optimizer in main memory):"
        f" {takes}, without output, and once for this Python",
        "trainer_plugins: torch compiles deepspeed_shm_comm first (DeepSpeed's collectives on the"
        f" CPU): {takes}, without output, and once for this Python",
        f"trainer_plugins: torch compiles mine first: {takes}, without output, and once for this Python",
    ]
