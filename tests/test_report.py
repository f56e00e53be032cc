"""The report reads sensibly whatever went into a folder, and a terminal obeys nothing that stands in it."""

import json
import os
import pty
import shutil
import struct
import subprocess
import sys
import termios
from dataclasses import replace
from fcntl import ioctl
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from rich.console import Group

from tests.events import at, takes
from tests.said_device import SaidDevice
from tests.test_thinning import STRATEGY
from tests.test_timeline import ENTRIES, READING
from trainer_plugins import CudaCacheCallback, EvalGenerateCleanup, MemoryWatchdog, StrategyInForce
from trainer_plugins.cli import app
from trainer_plugins.devices import GpuProcess
from trainer_plugins.record.history import read_history
from trainer_plugins.record.timeline import Beginning, Entry, Failure, Remark, Sample, to_line
from trainer_plugins.report.text import history_report
from trainer_plugins.units import GIB

# Sets a title, clears the screen, forges a line and a style, turns the direction of writing, ends a
# C1 string.
HOSTILE = "\x1b]0;mine\x07\x1b[2J\r\nall is well [red]text[/red] [link=file:///]x[/link] :bomb: \u202e\x9b31m\udc80\0"


def report(folder: Path, *options: str, width: int | None = None) -> str:
    """What the command prints, which has ended well; each line without the blanks around it."""
    environment = None if width is None else {"COLUMNS": str(width)}
    done = CliRunner().invoke(app, ["report", str(folder), *options], env=environment)
    assert done.exit_code == 0, done.output
    return "\n".join(line.strip() for line in done.stdout.splitlines())


def write(folder: Path, rank: int, entries: list[Entry]) -> Path:
    path = folder / "_trainer_plugins" / "memory" / f"rank-{rank}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(to_line(entry) + "\n" for entry in entries)
    return path


def run_of(
    steps: range, *, seconds: float, peak_gib: int = 1, begins: bool = True, outside: int = 0
) -> list[Entry]:
    """As MemoryWatchdog leaves it."""
    reading = replace(
        READING,
        total_bytes=80 * GIB,
        free_bytes=80 * GIB - outside - READING.reserved_bytes,
        peak_allocated_bytes=peak_gib * GIB,
    )
    moments = [(steps[0], "begin")] * begins + [(step, "train") for step in steps[1:]]
    return [
        Sample(step=step, moment=moment, reading=reading, time_seconds=seconds + number)
        for number, (step, moment) in enumerate(moments)
    ]


def blocks(text: str) -> list[list[str]]:
    """The lines of each run."""
    found: list[list[str]] = []
    for line in text.splitlines():
        if line.startswith("Run "):
            found.append([])
        if found:
            found[-1].append(line)
    return found


def test_each_run_into_a_folder_has_its_own_block_the_last_one_first(
    make_trainer, simgpu, tmp_path
) -> None:
    callbacks = (StrategyInForce, MemoryWatchdog, CudaCacheCallback, EvalGenerateCleanup)
    for mib in (150, 20):  # a launch, and another one
        torch.accelerator.empty_cache()
        make_trainer(
            at("step_begin", takes(mib)),
            *(each() for each in callbacks),
            eval_strategy="steps",
            eval_steps=4,
        ).train()
    again = make_trainer(
        at("step_begin", takes(60)),
        *(each() for each in callbacks),
        max_steps=3,
        save_strategy="steps",
    )
    again.train()
    again.train()  # as a cell of a notebook that is run twice
    again.evaluate()
    resumed = make_trainer(*(each() for each in callbacks), max_steps=5)
    resumed.train(resume_from_checkpoint=True)

    text = report(tmp_path / "run")
    assert text.splitlines()[0] == "5 runs wrote to this folder; the last one comes first"
    found = blocks(text)
    assert [each[0].split(":")[0] for each in found] == [
        f"Run {number} of 5" for number in (5, 4, 3, 2, 1)
    ]
    assert [each[0].split(": ")[1].split(",")[0] for each in found] == [
        "steps 3 to 5",
        "steps 0 to 3",
        "steps 0 to 3",
        "steps 0 to 8",
        "steps 0 to 8",
    ]
    assert all(
        each[1].startswith(f"from step {3 if number == 0 else 0}:")
        for number, each in enumerate(found)
    )
    trained = [
        next(line.split() for line in each if line.startswith("0") and " train " in line)
        for each in found
    ]
    *taken, nothing = [round(float(line[4])) // 10 * 10 for line in reversed(trained)]
    assert taken == [150, 20, 60, 60]
    assert nothing < 20, "what this card holds of other tests"
    reserved = [float(line[-2]) for line in trained]
    assert reserved[4] >= 150 > reserved[3] >= 20
    assert [sum(" eval " in line for line in each) for each in found] == [0, 1, 0, 1, 1]


def test_one_run_has_no_heading(make_trainer, tmp_path) -> None:
    make_trainer(MemoryWatchdog()).train()

    assert "Run " not in report(tmp_path / "run")
    assert "wrote to this folder" not in report(tmp_path / "run")


def test_ranks_with_different_numbers_of_runs_are_brought_together_by_time(tmp_path: Path) -> None:
    write(tmp_path, 0, run_of(range(5), seconds=100, peak_gib=10))  # on two ranks
    write(tmp_path, 1, run_of(range(5), seconds=101, peak_gib=11))
    write(
        tmp_path, 0, run_of(range(2, 6), seconds=500, peak_gib=20)
    )  # on rank 0 alone, from a checkpoint
    write(
        tmp_path, 0, run_of(range(4), seconds=1000, peak_gib=30, begins=False)
    )  # evaluations, or without a begin
    write(tmp_path, 1, run_of(range(4), seconds=1001, peak_gib=31))

    peaks = [
        [line.split()[4] for line in each if " train " in line] for each in blocks(report(tmp_path))
    ]
    assert peaks == [["31.00"], ["20.00"], ["11.00"]]
    least = [line.split()[-3:] for line in report(tmp_path).splitlines() if " train " in line]
    assert [" ".join(words) for words in least[::2]] == ["38% (rank 0)", "12% (rank 0)"]
    assert " 31.00 " not in report(tmp_path, "--rank", "0")
    assert " 30.00 " in report(tmp_path, "--rank", "0")


def test_of_two_ranks_the_one_with_more_outside_torch_may_be_the_fullest(tmp_path: Path) -> None:
    write(tmp_path, 0, run_of(range(3), seconds=100, peak_gib=40))
    write(tmp_path, 1, run_of(range(3), seconds=100, peak_gib=39, outside=20 * GIB))
    (row,) = (line.split() for line in report(tmp_path).splitlines() if " train " in line)
    assert (row[0], " ".join(row[4:6]), row[6]) == ("1", "39.00 GiB", "74%")
    assert " ".join(row[-3:]) == "50% (rank 0)"


def test_findings_that_differ_in_figures_alone_are_one_line_for_all_ranks(tmp_path: Path) -> None:
    remark = ENTRIES[2]
    assert isinstance(remark, Remark)
    for rank in (0, 1, 2):
        remarks: list[Entry] = [
            replace(
                remark,
                step=step,
                time_seconds=102,
                finding=replace(remark.finding, summary=f"{step} % is full", amount=step + rank),
            )
            for step in (3, 4)
        ]
        write(tmp_path, rank, [*run_of(range(3), seconds=100), *remarks])

    text = report(tmp_path)
    assert "ranks 0 to 2, steps 3 to 4, x 6, at worst: [x] 4 % is full" in text
    assert text.count("[x]") == 1

    facts = json.loads(report(tmp_path, "--json"))
    (run,) = facts["runs"]
    assert (run["ranks"], run["has_end"]) == ([0, 1, 2], False)
    assert run["peaks"][0]["moment"] == "begin"
    assert run["findings"][0]["times"] == 6
    assert facts["ending"]["code"] == "run-cut-off"


def test_only_a_run_that_ended_is_good_news(tmp_path: Path) -> None:
    def styles() -> list[str]:
        page = history_report(read_history(tmp_path))
        assert isinstance(page, Group)
        lines = [line for part in page.renderables for line in getattr(part, "renderables", [part])]
        return [str(line.style) for line in lines if "no findings" in str(line)]

    begun = run_of(range(3), seconds=100)
    write(tmp_path, 0, begun)
    assert styles() == [""]
    assert "rank 0: the timeline does not end" not in report(tmp_path), "it says cut off"

    sample = begun[-1]
    assert isinstance(sample, Sample)
    write(tmp_path, 0, [replace(sample, moment="end", time_seconds=104)])
    assert styles() == ["green"]

    write(tmp_path, 0, run_of(range(3), seconds=200))
    write(tmp_path, 0, run_of(range(3), seconds=300))
    text = report(tmp_path)
    assert text.count("rank 0: the timeline does not end: the process was killed, or") == 1
    assert styles() == ["", "", "green"]


def test_a_launch_that_dies_on_each_rank_before_it_trains_is_one_run(tmp_path: Path) -> None:
    for rank, seconds in ((0, 100.0), (1, 103.5), (0, 120.0), (1, 121.0)):
        words = "ValueError: no such file"
        failure = Failure(step=0, words=words, time_seconds=seconds, host=f"node{rank}")
        path = write(tmp_path, rank, [])
        with path.open("a") as file:  # each of a process of its own
            file.write(json.dumps({**json.loads(to_line(failure)), "run": str(seconds)}) + "\n")

    found = blocks(report(tmp_path))
    assert [each[0][:10] for each in found] == ["Run 2 of 2", "Run 1 of 2"]
    for each in found:
        assert [line for line in each if "ValueError" in line] == [
            f"rank {rank} on node{rank}, step 0: ValueError: no such file" for rank in (0, 1)
        ]


def test_the_machine_of_each_rank_is_named_and_ranks_that_wrote_elsewhere_too(
    tmp_path: Path,
) -> None:
    """Each of three machines has an output_dir of its own; copied into one they are one run."""
    strategy = replace(STRATEGY, world_size=6)
    for rank in range(6):
        began = Beginning(
            step=0,
            strategy=strategy,
            time_seconds=100.2,
            host=f"node{rank // 2}",
            job="Slurm 4242",
        )
        folder = tmp_path / str(rank // 2)
        write(folder, rank, [*run_of(range(2), seconds=100)[:1], began])

    text = report(tmp_path / "1")
    assert "Slurm 4242, ranks 2 to 3 on node1\n" in text
    assert "4 ranks of 0 to 5 wrote nothing here. If each machine has an output_dir" in text
    assert "wrote nothing here" not in report(tmp_path / "1", "--rank", "2")
    for other in ("0", "2"):
        shutil.copytree(tmp_path / other, tmp_path / "1", dirs_exist_ok=True)
    text = report(tmp_path / "1")
    assert "Slurm 4242, ranks 0 to 1 on node0, ranks 2 to 3 on node1, ranks 4 to 5 on node2" in text
    assert "wrote nothing here" not in text
    (run,) = json.loads(report(tmp_path / "1", "--json"))["runs"]
    assert (run["hosts"]["5"], run["jobs"], run["missing_ranks"]) == ("node2", ["Slurm 4242"], [])


def test_two_launches_at_the_same_time_are_told_apart(tmp_path: Path) -> None:
    one, other = (
        run_of(range(5), seconds=100, peak_gib=10),
        run_of(range(5), seconds=100.5, peak_gib=20),
    )
    path = write(tmp_path, 0, [])
    lines = [json.loads(to_line(entry)) for pair in zip(one, other, strict=True) for entry in pair]
    path.write_text(
        "".join(
            json.dumps({**line, "run": "ab"[number % 2]}) + "\n"
            for number, line in enumerate(lines)
        )
    )

    peaks = [
        [line.split()[4] for line in each if " train " in line] for each in blocks(report(tmp_path))
    ]
    assert peaks == [["20.00"], ["10.00"]]


# As of one process: those that share the tests have to give them the same names.
SAMPLE, FLUSH, REMARK = (json.loads(to_line(entry)) | {"run": "0123abcd"} for entry in ENTRIES[:3])


@pytest.mark.parametrize(
    "line",
    [
        json.dumps(SAMPLE | {"peak_allocated_bytes": float("nan")}),
        json.dumps(SAMPLE | {"total_bytes": 0}),
        json.dumps(SAMPLE | {"free_bytes": -5}),
        json.dumps(SAMPLE | {"step": -1}),
        json.dumps(SAMPLE | {"reserved_bytes": 10**400}),
        json.dumps(SAMPLE | {"reserved_bytes": "9"}),
        json.dumps(SAMPLE | {"time_seconds": 1e300}),
        json.dumps(SAMPLE | {"time_seconds": None}),
        json.dumps(SAMPLE | {"moment": ["train"]}),
        json.dumps(SAMPLE | {"device": {}}),
        json.dumps(SAMPLE | {"num_readings": "many"}),
        json.dumps(REMARK | {"severity": 31}),
        json.dumps(REMARK | {"code": [[]]}),
        json.dumps(REMARK | {"amount": float("inf")}),
        json.dumps(FLUSH | {"reason": 1}),
        json.dumps(FLUSH | {"seconds": float("nan")}),
        '{"kind": "beginning", "time_seconds": 1, "step": 1, "num_params": "7", "offload": [], "homes": 3}',
        '{"kind": ["sample"]}',
        '{"kind": "of-a-later-version", "time_seconds": 1, "step": 1}',
        '{"kind": "sample"',
        "[1, 2]",
        "17",
        "9" * 5000,
        "[" * 100_000,
        '{"a":' * 100_000,
        "x" * 1_000_000,
        "x" * 3_000_000,
        "\0" * 300,
        '"\\ud800"',
    ],
    ids=lambda line: line[:70] + str(len(line)),
)  # fmt: skip
def test_a_line_that_no_run_writes_is_passed_over_and_said(tmp_path: Path, line: str) -> None:
    path = write(tmp_path, 0, ENTRIES)
    clean = report(tmp_path)
    with path.open("ab") as file:
        file.write(line.encode() + b"\n\xff\xfe\n")

    text = report(tmp_path)
    assert "rank 0: skipped 2 lines: cut off by a kill or a full disk" in text
    assert [each for each in text.splitlines() if "skipped" not in each] == clean.splitlines()


def test_a_half_line_at_the_end_is_said_and_a_file_without_entries_too(tmp_path: Path) -> None:
    path = write(tmp_path, 0, ENTRIES)
    os.truncate(path, path.stat().st_size - 5)
    assert "rank 0: skipped 1 line:" in report(tmp_path)

    path.write_bytes(b"")
    assert report(tmp_path).startswith("The files are empty")


@pytest.mark.parametrize("kind", ["fifo", "folder", "device"])
def test_what_is_no_file_is_bad_input_and_keeps_nobody_waiting(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "_trainer_plugins" / "memory" / "rank-0.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    {"fifo": os.mkfifo, "folder": os.mkdir, "device": lambda at: os.symlink("/dev/zero", at)}[kind](
        path
    )

    done = subprocess.run(
        [sys.executable, "-m", "trainer_plugins", "report", str(tmp_path)],
        check=False, capture_output=True, text=True, timeout=120, env={**os.environ, "COLUMNS": "1000"},
    )  # fmt: skip
    assert done.returncode == 2
    assert f"{path}: " in done.stderr
    assert "Traceback" not in done.stderr


def obeyed(text: str) -> list[str]:
    """What a terminal would not only show."""
    return [each for each in text.replace("\n", "") if not each.isprintable()]


def test_foreign_text_in_a_timeline_is_shown_and_not_obeyed(tmp_path: Path) -> None:
    reading = replace(READING, device=HOSTILE)
    finding = replace(ENTRIES[2].finding, summary=HOSTILE, evidence="m" * 1_000_000)  # type: ignore[union-attr]
    write(
        tmp_path,
        0,
        [Sample(step=1, moment=HOSTILE, reading=reading), Remark(step=1, finding=finding)],
    )

    text = report(tmp_path)
    assert obeyed(text) == []
    shown = r"\x1b]0;mine\x07\x1b[2J  all is well [red]text[/red] [link=file:///]x[/link] :bomb: \u202e\x9b31m"
    assert text.count(shown) == 3
    assert not any(line.startswith("all is well") for line in text.splitlines())
    assert len(text) < 10_000


@pytest.mark.slow
@pytest.mark.all
def test_foreign_text_in_files_for_other_commands_is_shown_and_not_obeyed(tmp_path: Path) -> None:
    name = HOSTILE.replace("\0", "").replace("/", "")
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": HOSTILE, HOSTILE: HOSTILE}))
    launch = tmp_path / f"{name}.yaml"
    launch.write_text(
        json.dumps({HOSTILE: HOSTILE, "distributed_type": HOSTILE, "num_processes": HOSTILE})
    )
    for arguments, code in (
        (["configs", "check", str(launch)], (1, 2)),
        (["configs", "check", str(tmp_path / f"{name}.missing")], (2,)),
        (["configs", "show", name], (2,)),
        (["report", str(tmp_path / name)], (2,)),
        (["report", str(tmp_path), name], (2,)),
        (["plan", "--model", str(config)], (2,)),
        (["plan", "--model", str(tmp_path / name)], (2,)),
        (["plan", "--model", str(config), "--gpu", name], (2,)),
    ):
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code in code, (arguments, done.output)
        assert done.output.strip()
        assert obeyed(done.output) == [], arguments


def test_the_name_of_a_neighbour_is_shown_in_the_log_and_not_obeyed(make_trainer, caplog) -> None:
    class Crowded(SaidDevice):
        """A card on which a process with a name of its own choice holds most."""

        def processes(self) -> tuple[GpuProcess, ...]:  # type: ignore[override]
            return GpuProcess(os.getpid(), GIB, "python"), GpuProcess(4242, 69 * GIB, HOSTILE)

    make_trainer(MemoryWatchdog(device=Crowded(non_torch_bytes=69 * GIB))).train()

    (said,) = {
        record.getMessage() for record in caplog.records if "foreign-memory" in record.getMessage()
    }
    assert r"pid 4242 (\x1b]0;mine\x07\x1b[2J  all is well" in said
    assert obeyed(said) == []
    assert "\n" not in said


WIDE = replace(
    READING, device="cuda:15", total_bytes=1536 * GIB, free_bytes=0, reserved_bytes=1234 * GIB,
    peak_allocated_bytes=1023 * GIB,
)  # fmt: skip


@pytest.mark.parametrize("width", [20, 40, 1000])
def test_figures_are_whole_where_the_report_goes_to_a_file(tmp_path: Path, width: int) -> None:
    write(tmp_path, 10, [Sample(step=1, moment="predict", reading=WIDE), ENTRIES[2]])

    text = report(tmp_path, width=width)
    rows = [" ".join(line.split()) for line in text.splitlines()]
    assert "10 predict cuda:15 1 1023.00 GiB 86% 1536.00 GiB 1234.00 GiB" in rows
    assert 'rank 10, step 2: [x] s (e "quoted" ). r' in text  # in one line, for those who search


def test_figures_are_whole_on_a_narrow_terminal(tmp_path: Path) -> None:
    write(tmp_path, 10, [Sample(step=1, moment="predict", reading=WIDE), ENTRIES[2]])
    ours, theirs = pty.openpty()
    ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 40, 0, 0))
    environment = {**os.environ, "TERM": "xterm"}
    for name in ("COLUMNS", "LINES"):
        environment.pop(name, None)
    process = subprocess.Popen(
        [sys.executable, "-m", "trainer_plugins", "report", str(tmp_path)],
        stdout=theirs,
        stderr=theirs,
        env=environment,
    )
    os.close(theirs)
    shown = b""
    while True:
        try:
            piece = os.read(ours, 1 << 16)
        except OSError:  # the other end is closed
            break
        shown += piece
        if not piece:
            break
    os.close(ours)

    assert process.wait(120) == 0
    text = shown.decode()
    assert "…" not in text
    for figure in ("1023.00 GiB", "86%", "1536.00 GiB", "1234.00 GiB"):
        assert figure in text
