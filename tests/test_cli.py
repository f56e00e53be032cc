"""The command, as a user calls it."""

import json
import os
import pty
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests import commands, processes
from tests.test_timeline import ENTRIES
from trainer_plugins import __version__
from trainer_plugins.cli import app
from trainer_plugins.record.timeline import Timeline
from trainer_plugins.testing.nvml import ScriptedNvml, unavailable_reason


def command(*arguments: object) -> subprocess.CompletedProcess[str]:
    return processes.run([sys.executable, "-m", "trainer_plugins", *map(str, arguments)])


def test_the_report_of_a_run(tmp_path: Path) -> None:
    for rank in (0, 1):
        timeline = Timeline(tmp_path / "_trainer_plugins" / "memory" / f"rank-{rank}.jsonl")
        for entry in ENTRIES:
            timeline.add(entry)

    (tmp_path / "_trainer_plugins" / "memory" / "rank-0-old.jsonl").write_text("a user's copy")

    done = command("report", tmp_path)

    assert done.returncode == 0, done.stderr
    assert done.stdout.count("cuda:0") == 1
    assert "55%" in done.stdout
    assert "ranks 0 to 1: 2 releases freed 0.0 MiB and took 250.0 ms on" in done.stdout
    assert "ranks 0 to 1, step 2, x 2, at worst: [x] s (e" in done.stdout
    assert str(tmp_path / "_trainer_plugins" / "memory" / "rank-1.jsonl") in done.stdout.replace(
        "\n", ""
    )


def test_a_folder_without_a_run_is_bad_input(tmp_path: Path) -> None:
    done = command("report", tmp_path)

    assert done.returncode == 2
    assert "give the output_dir of a run that had" in done.stderr


@pytest.mark.parametrize(
    "words", [("configs", "list"), ("report", "{run}"), ("report", "{run}", "--json")]
)
def test_a_reader_that_closes_the_pipe_changes_nothing(tmp_path: Path, words) -> None:
    """As in `trainer-plugins plan ... | head -1`."""
    timeline = Timeline(tmp_path / "_trainer_plugins" / "memory" / "rank-0.jsonl")
    for entry in ENTRIES:
        timeline.add(entry)
    arguments = [word.format(run=tmp_path) for word in words]
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = subprocess.run(
        [sys.executable, "-m", "trainer_plugins", *arguments],
        check=False,
        stdout=write_end,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(write_end)
    assert (done.returncode, done.stderr) == (0, "")


def test_an_explanation_keeps_its_indent_where_a_terminal_wraps_it(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text(
        '  File "train.py", line 7, in <module>\n    trainer.train()\n'
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total"
        " capacity of 23.55 GiB of which 1.20 GiB is free. Of the allocated memory 20.00 GiB is"
        " allocated by PyTorch, and 1.00 GiB is reserved by PyTorch but unallocated.\n"
    )
    ours, terminal = pty.openpty()
    words = [sys.executable, "-m", "trainer_plugins", "explain", str(log)]
    subprocess.run(words, check=True, stdout=terminal, env={**os.environ, "COLUMNS": "60"})
    on_terminal = os.read(ours, 1 << 16).decode()
    assert "\x1b[1m" in on_terminal
    lines = re.sub(r"\x1b\[[\d;]*m", "", on_terminal).splitlines()
    assert {line[:4].strip() for line in lines} == {"Caus", "Try", "Or", "More", ""}
    assert max(map(len, lines)) <= 60
    in_a_file = CliRunner().invoke(app, ["explain", str(log)]).output
    assert " ".join(in_a_file.split()) == " ".join(" ".join(lines).split())
    assert len(lines) > len(in_a_file.splitlines())


def test_an_explanation_of_a_log_imports_little() -> None:
    words = [sys.executable, "-X", "importtime", "-m", "trainer_plugins", "explain"]
    log = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    done = subprocess.run(words, check=True, capture_output=True, text=True, input=log)
    heavy = {"torch", "rich", "pydantic", "importlib.metadata", "trainer_plugins.record.timeline"}
    assert {line.split()[-1] for line in done.stderr.splitlines()} & heavy == set()


def test_the_version() -> None:
    assert command("--version").stdout == f"trainer-plugins {__version__}\n"


def shown(*arguments: str) -> str:
    return CliRunner().invoke(app, [*arguments]).output


def test_the_commands_stand_in_the_order_of_a_run() -> None:
    text = shown("-h")
    places = [text.index(f"{panel}:") for panel in ("Before the run", "During the run")]
    places += [text.index("  exec "), text.index("After the run:"), text.index("  explain ")]
    assert places == sorted(places)


@pytest.mark.parametrize("name", re.findall("^## (.+)", commands.PAGE.read_text(), re.MULTILINE))
def test_each_help_has_an_example_that_the_command_line_takes(name: str) -> None:
    words = name.split()
    text = " ".join(shown(*words, "-h").split())
    assert f"Usage: trainer-plugins {' '.join(words)}" in text
    assert f"trainer-plugins {' '.join(words)}" in text.split("Options: ")[0][45:]


def test_the_help_of_plan_begins_with_what_most_need() -> None:
    text = shown("plan", "-h")
    panels = re.findall(r"^(\w.*):$", text, re.MULTILINE)
    assert panels[:2] == ["Most used", "Model"]
    assert len(panels) == len(set(panels)) == 9
    first = text.split("Most used:")[1].split("Model:")[0]
    assert re.findall(r"^  (--[\w-]+)", first, re.MULTILINE) == [
        "--model", "--seq-length", "--lora-r", "--load-in-4bit", "--gpu", "--num-gpus",
        "--accelerate-config", "--search", "--verbose", "--html", "--json",
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["check", "plan", "env", "top", "report", "explain"])
def test_the_help_breaks_no_word_at_80_columns(name: str) -> None:
    narrow, endless = (
        CliRunner().invoke(app, [name, "-h"], terminal_width=width).output for width in (80, 9999)
    )
    assert max(map(len, narrow.splitlines())) <= 80 < max(map(len, endless.splitlines()))
    assert narrow.split() == endless.split()


def test_check_takes_what_describes_a_run_and_its_help_is_short() -> None:
    text = shown("check", "-h").partition("Most used:")[2]
    assert re.findall(r"^  (-[\w-]+)", text, re.MULTILINE) == [
        "--model", "--seq-length", "--lora-r", "--load-in-4bit", "--gpu", "--num-gpus",
        "--accelerate-config", "--verbose", "--json", "--host-memory", "-h",
    ]  # fmt: skip
    of_each = dict(commands.commands())
    of_plan, of_check = ({one.name for one in of_each[name].params} for name in ("plan", "check"))
    of_a_command = {"steps", "alone", "snapshot", "dry_env"}
    of_a_command |= {"allow_writes", "allow_network"}
    of_an_answer = {"search", "search_lengths", "explain_change", "html", "calibrate"}
    assert of_plan - of_a_command - of_an_answer == of_check


def test_the_shell_completes_commands_flags_and_launch_files() -> None:
    said = []
    for words in ("pl", "plan --from", "configs path zero3_offload_o", "exec --pre"):
        line = f"trainer-plugins {words}"
        environ = {
            "COMP_WORDS": line,
            "COMP_CWORD": str(line.count(" ")),
            "_TRAINER_PLUGINS_COMPLETE": "bash_complete",
        }
        done = subprocess.run(
            [sys.executable, "-c", "from trainer_plugins.cli import app; app(prog_name='trainer-plugins')"],
            check=False, capture_output=True, text=True, env={**os.environ, **environ},
        )  # fmt: skip
        said.append(done.stdout.strip())
    names = ["plan", "--from-hub", "zero3_offload_optimizer", "--preset"]
    assert said == [f"plain,{name}" for name in names]


def test_what_a_bug_report_needs_names_no_people_and_no_machines(tmp_path: Path) -> None:
    if unavailable_reason() and not os.environ.get("CI"):
        pytest.skip(str(unavailable_reason()))
    driver = ScriptedNvml(tmp_path).driver(version="580.95.05").card().card().write()
    home = str(tmp_path / "somebody")
    environ = {**os.environ, **driver.env(), "HOME": home, "USER": "somebody"}
    environ |= {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "HF_TOKEN": "hf_secretsecret"}

    done = subprocess.run(
        [sys.executable, "-m", "trainer_plugins", "env", "--info", "--json"],
        check=False, capture_output=True, text=True, env=environ,
    )  # fmt: skip

    facts = json.loads(done.stdout)
    assert facts["versions"]["trainer-plugins"] == __version__
    assert {"python", "torch", "transformers", "accelerate"} <= set(facts["versions"])
    assert facts["cards"] == {
        "driver": "580.95.05",
        "cards": "2 x NVIDIA H100 80GB HBM3, 79.41 GiB",
    }
    assert facts["allocator"] == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    for secret in ("somebody", "hf_secret", "GPU-", socket.gethostname()):
        assert secret not in done.stdout
