"""What is found where the files belong, and what becomes of them, ends no training and is said."""

import os
import shutil
import sys
from pathlib import Path

from tests import processes
from tests.events import at
from tests.written import read_entries
from trainer_plugins import MemoryWatchdog
from trainer_plugins.record.timeline import Sample

NO_FILES = ("fifo", "fifo with a reader", "device", "socket", "folder", "symlink loop")

TRAINS_ANYWAY = """
import os, shutil, socket, sys
from pathlib import Path
from transformers import Trainer, TrainingArguments
from tests.models import tiny_llama, token_rows
from trainer_plugins import MemoryWatchdog
for kind in sys.argv[2].split(","):
    run = Path(sys.argv[1]) / kind
    for path in (run / "_trainer_plugins" / "memory" / "rank-0.jsonl", run / "node" / "trainer_plugins-rank-0.prom"):
        path.parent.mkdir(parents=True)
        if kind.startswith("fifo"):
            os.mkfifo(path)
        if kind == "fifo with a reader":
            readers = [*globals().get("readers", []), os.open(path, os.O_RDWR | os.O_NONBLOCK)]
        if kind == "device":
            path.symlink_to("/dev/zero")
        if kind == "socket":
            os.chdir(path.parent)
            socket.socket(socket.AF_UNIX).bind(path.name)
        if kind == "folder":
            (path / "of a user").mkdir(parents=True)
        if kind == "symlink loop":
            path.symlink_to(path)
    settings = dict(max_steps=2, report_to="none", disable_tqdm=True, use_cpu=True, save_strategy="no", logging_steps=1)
    watchdog = MemoryWatchdog(prometheus_dir=run / "node")
    args = TrainingArguments(str(run), **settings)
    trainer = Trainer(tiny_llama(), args, train_dataset=token_rows(), callbacks=[watchdog])
    trainer.train()
    print(kind, trainer.state.global_step, watchdog._timeline.num_added, *os.listdir(run / "node"), sep=";", flush=True)
"""


def test_what_is_no_file_keeps_nobody_waiting(tmp_path: Path) -> None:
    # In a process of its own, with an end: a write to a FIFO waits for ever.
    command = [sys.executable, "-c", TRAINS_ANYWAY, str(tmp_path), ",".join(NO_FILES)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent.parent)}
    done = processes.run(command, environ=environment)

    prom = "trainer_plugins-rank-0.prom"
    told = [line for line in done.stdout.splitlines() if line.split(";")[0] in NO_FILES]
    assert told == [f"{kind};2;4;{prom}" for kind in NO_FILES], (
        done.stderr
    )  # no draft is left either
    assert done.stderr.count("the memory timeline could not be written to") == len(NO_FILES)
    assert done.stderr.count("not a regular file") == 3  # the others cannot even be opened
    # Only what cannot be replaced, a folder, stays in the way of the metrics.
    assert done.stderr.count("memory metrics could not be written to") == 1
    assert (tmp_path / "fifo" / "node" / prom).read_text().startswith("# HELP")


def test_an_output_dir_taken_away_is_made_again_and_said_once(
    make_trainer, tmp_path: Path, caplog
) -> None:
    takes_away = at("step_begin", lambda now: shutil.rmtree(now.args.output_dir), 3, 6)
    make_trainer(takes_away, MemoryWatchdog()).train()

    assert [(each.step, each.moment) for each in read_entries(tmp_path / "run", Sample)] == [
        (7, "train"), (8, "train"), (8, "end"),
    ]  # fmt: skip
    assert caplog.text.count("was removed while the run was writing it: it was created again") == 1


def test_half_a_line_of_a_run_before_swallows_nothing(make_trainer, tmp_path: Path) -> None:
    path = tmp_path / "run" / "_trainer_plugins" / "memory" / "rank-0.jsonl"
    make_trainer(MemoryWatchdog(), max_steps=2).train()
    os.truncate(path, path.stat().st_size - 20)  # what a disk that was full at the end leaves
    make_trainer(MemoryWatchdog(), max_steps=2).train()

    first, second = ["begin", "train", "train"], ["begin", "train", "train", "end"]
    assert [each.moment for each in read_entries(tmp_path / "run", Sample)] == first + second
