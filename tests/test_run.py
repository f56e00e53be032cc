"""python -m trainer_plugins.run: the script runs as it would under python, with callbacks on its Trainers."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import processes
from tests.offers import install_transformers
from tests.written import read_steps

ROOT = Path(__file__).parent.parent
NOTHING = "trainer_plugins: nothing was attached: this process built no transformers.Trainer"
SCRIPT = """
import sys
assert not {"torch", "transformers"} & set(sys.modules)  # what a script sets before it imports them still counts
assert vars(sys.modules["__main__"]) is globals()
print(sys.argv[1:], sys.path[0], __file__)
from transformers import Trainer, TrainingArguments
from tests.models import tiny_llama, token_rows
args = TrainingArguments("out", max_steps=4, report_to="none", save_strategy="no", use_cpu=True)
trainer = Trainer(tiny_llama(), args, train_dataset=token_rows())  # stays until Python takes everything down
trainer.train()
sys.exit(3)
"""


def run(
    *arguments: object, cwd: Path, path: str = "", fresh: str = ""
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "trainer_plugins.run", *map(str, arguments)]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [path, str(ROOT)]))}
    return processes.run(command, cwd=cwd, environ=environ, fresh=fresh)


def test_a_script_trains_with_callbacks_and_nothing_else_is_different(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "train.py").write_text(SCRIPT)

    done = run(
        *("--memory-every-steps", "2", "scripts/train.py", "--preset", "its own"),
        cwd=tmp_path,
        fresh="the script asks whether torch was imported before it",
    )

    assert done.returncode == 3, done.stderr
    assert (
        done.stdout.splitlines()[0]
        == f"['--preset', 'its own'] {tmp_path / 'scripts'} scripts/train.py"
    )
    assert read_steps(tmp_path / "out") == [2, 4]
    assert "nothing was attached" not in done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


def test_a_value_error_of_the_users_package_is_the_users(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text(
        "raise ValueError('numpy.dtype size changed')"
    )
    (tmp_path / "package" / "job.py").write_text("")

    done = run("-m", "package.job", cwd=tmp_path)

    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "ValueError: numpy.dtype size changed"
    assert "Traceback" in done.stderr


def test_a_module_that_raises_and_builds_no_trainer(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__main__.py").write_text(
        "import sys\nprint(sys.argv, sys.path[0])\n1 / 0\n"
    )

    done = run("--preset=observe", "-m", "package", "-m", "x", cwd=tmp_path)

    assert done.returncode == 1
    assert done.stdout == f"[{str(tmp_path / 'package' / '__main__.py')!r}, '-m', 'x'] {tmp_path}\n"
    assert done.stderr.endswith("ZeroDivisionError: division by zero\n")  # that says it all


def test_a_fork_and_a_child_do_not_speak_for_the_script(tmp_path: Path) -> None:
    (tmp_path / "forks.py").write_text(
        "import os, sys\nif os.fork():\n    os.wait()\nsys.exit(0)\n"
    )

    done = run("forks.py", cwd=tmp_path)

    assert done.returncode == 0
    assert done.stderr.count(NOTHING) == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["no_such_script.py"], "cannot open no_such_script.py: No such file or directory"),
        (["-m", "no_such_package.module"], "there is no module no_such_package.module here"),
        ([], "name a script, or a module after -m"),
        (["--memory-warn-fracton", "0.8", "train.py"], "--memory-warn-fraction"),
        (["--preset", "memory-safe", "train.py"], "Did you mean memory_safe?"),
        (
            ["--memory_every_steps", "0", "train.py"],
            "memory_every_steps is a number of optimizer steps",
        ),
        (["--memory-every-steps", "often", "train.py"], "Invalid value for '--memory-every-steps'"),
    ],
)
def test_bad_input_is_one_line_and_runs_nothing(tmp_path: Path, arguments, says) -> None:
    (tmp_path / "train.py").write_text("print('ran')")

    done = run(*arguments, cwd=tmp_path)

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("python -m trainer_plugins.run: ")
    assert says in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_transformers_that_is_too_old(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('ran')")

    done = run("train.py", cwd=tmp_path, path=install_transformers(tmp_path, "4.45.1"))

    assert (done.returncode, done.stdout) == (2, "")
    assert "works with transformers 4.57.1 or newer, but this is 4.45.1" in done.stderr


def test_a_module_that_lacks_something_says_what(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("import no_such_dependency")

    done = run("-m", "package.train", cwd=tmp_path)

    assert done.returncode == 1
    assert "No module named 'no_such_dependency'" in done.stderr
