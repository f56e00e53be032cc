"""`trainer-plugins env`, as a user calls it, and what it rests on."""

import json
import os
import shlex
import shutil
import subprocess
import sys

import pytest

from tests import processes
from tests.check.test_command import WITHOUT_TORCH
from trainer_plugins.launch import environment
from trainer_plugins.launch.environment import launch_environment

NAMES = (
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "OMP_NUM_THREADS",
    "TOKENIZERS_PARALLELISM",
    "HF_HUB_DISABLE_TELEMETRY",
)


def clean(**variables: str) -> dict[str, str]:
    """This environment, without what `env` may set."""
    return {name: text for name, text in os.environ.items() if name not in NAMES} | variables


def call(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run it in a process that fails if torch or transformers was imported."""
    command = [sys.executable, "-c", WITHOUT_TORCH, "env", *arguments]
    return processes.run(command, environ=clean(**variables), fresh="as a shell starts it")


def in_shell(shell: str, script: str, **variables: str) -> dict[str, str]:
    """Run a script in a shell, and give the environment of the programs it would start then."""
    show = (
        f"{shlex.quote(sys.executable)} -c 'import json, os; print(json.dumps(dict(os.environ)))'"
    )
    command = [
        shell,
        "-c",
        script.replace("ENV", f"{shlex.quote(sys.executable)} -m trainer_plugins env")
        + f"\n{show}",
    ]
    done = subprocess.run(
        command, env=clean(**variables), capture_output=True, text=True, check=True
    )
    return dict(json.loads(done.stdout))


@pytest.mark.parametrize("shell", [name for name in ("bash", "dash") if shutil.which(name)])
@pytest.mark.parametrize(
    "own", ["", "max_split_size_mb:128", "max_split_size_mb: 128 ,", "expandable_segments:False"]
)
@pytest.mark.all(but=2)
def test_a_shell_reads_it(shell: str, own: str) -> None:
    variables = {"PYTORCH_CUDA_ALLOC_CONF": own} if own else {}
    after = in_shell(shell, 'eval "$(ENV)"', **variables)

    if own:
        assert after["PYTORCH_ALLOC_CONF"] == after["PYTORCH_CUDA_ALLOC_CONF"] == own
    for export in json.loads(call("--json", **variables).stdout)["exports"]:
        assert after[export["name"]] == export["value"]
        assert len(export["purpose"]) > 20
    assert after["TOKENIZERS_PARALLELISM"] == "false"


def test_what_the_user_puts_into_a_variable_is_never_run() -> None:
    hostile = (
        "max_split_size_mb:64'; exit 3 $(exit 4) \\ #"  # torch takes it for 64, so it is mirrored
    )
    after = in_shell(
        "bash", 'eval "$(ENV 2>/dev/null)"', PYTORCH_ALLOC_CONF=hostile, OMP_NUM_THREADS="3"
    )

    assert after["PYTORCH_CUDA_ALLOC_CONF"] == after["PYTORCH_ALLOC_CONF"] == hostile
    assert after["OMP_NUM_THREADS"] == "3"


@pytest.mark.skipif(shutil.which("fish") is None, reason="no fish")
def test_fish_reads_it() -> None:
    after = in_shell(
        "fish", "ENV --shell fish | source", PYTORCH_CUDA_ALLOC_CONF="max_split_size_mb:128"
    )

    assert after["PYTORCH_ALLOC_CONF"] == "max_split_size_mb:128"


def test_the_syntax_of_fish() -> None:
    done = call("--shell", "fish", PYTORCH_CUDA_ALLOC_CONF="max_split_size_mb:128")

    assert done.returncode == 0
    assert "set -gx PYTORCH_ALLOC_CONF 'max_split_size_mb:128'" in done.stdout
    assert "export" not in done.stdout


def test_what_is_wrong_with_the_present_values_goes_to_stderr() -> None:
    done = call(PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True,max_split_size_mb:128")

    assert done.returncode == 0
    assert "[allocator-expandable-and-max-split]" in done.stderr
    assert "export PYTORCH" not in done.stdout
    assert "# no allocator settings: those in PYTORCH_CUDA_ALLOC_CONF are wrong" in done.stdout


def test_with_vllm_in_the_process_segments_do_not_grow() -> None:
    assert "expandable_segments:True" not in call("--vllm").stdout
    assert "# no allocator settings: vLLM in the training process" in call("--vllm").stdout


def test_an_unknown_shell_is_bad_input() -> None:
    assert call("--shell", "tcsh").returncode == 2


def test_the_threads_are_shared_between_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def threads(cpus: int, cards: int) -> str | None:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: {*range(cpus)})
        visible = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(cards)))}
        exports = launch_environment(visible).exports
        return {export.name: export.value for export in exports}.get("OMP_NUM_THREADS")

    assert [threads(64, 8), threads(2, 8)] == ["8", "1"]
    assert threads(64, 0) is None  # how many ranks there will be is not told


def test_what_this_machine_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    def exports(**environ: str) -> dict[str, str]:
        return {export.name: export.purpose for export in launch_environment(environ).exports}

    assert "give --vllm" not in exports()["PYTORCH_CUDA_ALLOC_CONF"]
    monkeypatch.setattr(environment, "find_spec", lambda name: name == "vllm")
    assert "give --vllm" in exports()["PYTORCH_CUDA_ALLOC_CONF"]
    assert "PYTORCH_CUDA_ALLOC_CONF" not in exports(CUDA_VISIBLE_DEVICES="MIG-aaaa")
    assert "TOKENIZERS_PARALLELISM" not in exports(TOKENIZERS_PARALLELISM="true")
