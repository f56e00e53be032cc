"""The numbers of the watchdog are found where people look: trackers, the log history, a file for Prometheus."""

import json
import os
import resource
import shutil
import sqlite3

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import Trainer, TrainerCallback

from tests.callbacks.test_memory_watchdog import thrash
from tests.events import at, takes
from tests.written import read_entries
from trainer_plugins import CudaCacheCallback, MemoryWatchdog
from trainer_plugins.devices import HostDevice
from trainer_plugins.record.timeline import Flush, Sample, Timeline
from trainer_plugins.units import GIB, MIB

NAMES = {
    "memory/peak_gib",
    "memory/reserved_gib",
    "memory/foreign_gib",
    "memory/pressure_fraction",
    "memory/alloc_retries",
    "memory/flush_seconds",
}
LOGGED = {"logging_strategy": "steps", "logging_steps": 2}


def numbers(row: dict) -> dict[str, float]:
    return {name: value for name, value in row.items() if name.startswith("memory/")}


def rows(trainer: Trainer) -> dict[int, dict[str, float]]:
    """Step -> the numbers in the log history."""
    return {row["step"]: numbers(row) for row in trainer.state.log_history if numbers(row)}


def test_the_lines_of_training_have_the_numbers(make_trainer, simgpu, tmp_path) -> None:
    trainer = make_trainer(
        at("step_begin", lambda now: takes(20 * (now.state.global_step + 1))(now)),
        MemoryWatchdog(),
        **LOGGED,
        save_strategy="steps",
        save_steps=4,
        eval_strategy="steps",
        eval_steps=8,
    )
    trainer.train()

    assert list(rows(trainer)) == [2, 4, 6, 8]
    assert all(
        set(row) == NAMES and {type(value) for value in row.values()} == {float}
        for row in rows(trainer).values()
    )
    assert [round(row["memory/peak_gib"] * 1024 / 20) for row in rows(trainer).values()] == [
        2,
        4,
        6,
        8,
    ]
    assert 160 / 256 < rows(trainer)[8]["memory/pressure_fraction"] < 180 / 256
    reserved = next(
        e.reading.reserved_bytes for e in read_entries(tmp_path / "run", Sample) if e.step == 8
    )
    assert rows(trainer)[8]["memory/reserved_gib"] * GIB == reserved
    # Those of an evaluation and of the whole training stay as they were.
    assert all("loss" in row for row in trainer.state.log_history if numbers(row))

    saved = json.loads((tmp_path / "run" / "checkpoint-4" / "trainer_state.json").read_text())
    assert {row["step"]: numbers(row) for row in saved["log_history"]} == {
        k: rows(trainer)[k] for k in (2, 4)
    }


class EvaluatesItself(Trainer):
    """Logs a loss of its own, and returns what it logged."""

    def evaluate(self, *args, **kwargs):
        metrics = {"loss": 1.0}
        self.log(metrics)
        self.returned = [*getattr(self, "returned", []), metrics]
        return metrics


def test_an_evaluation_that_logs_a_loss_keeps_its_own(make_trainer) -> None:
    trainer = make_trainer(
        MemoryWatchdog(),
        trainer_class=EvaluatesItself,
        **LOGGED,
        eval_strategy="steps",
        eval_steps=4,
    )
    trainer.train()
    trainer.evaluate()

    assert len(trainer.returned) >= 3
    assert not any(numbers(metrics) for metrics in trainer.returned)
    assert list(rows(trainer)) == [2, 4, 6, 8]


def test_nothing_leaks_into_what_train_and_evaluate_return(make_trainer, tmp_path) -> None:
    trainer = make_trainer(MemoryWatchdog(), **LOGGED, eval_strategy="steps", eval_steps=4)
    returned = trainer.train().metrics
    trainer.save_metrics("train", returned)
    evaluated = trainer.evaluate()
    trainer.save_metrics("eval", evaluated)
    predicted = trainer.predict(trainer.eval_dataset).metrics

    assert rows(trainer)
    assert not {*numbers(returned), *numbers(evaluated), *numbers(predicted)}
    assert "memory" not in (tmp_path / "run" / "all_results.json").read_text()


@pytest.mark.parametrize("added", ["with callbacks=[...]", "later"])
def test_tensorboard_shows_them(make_trainer, tmp_path, added: str) -> None:
    given = [MemoryWatchdog()] if added != "later" else []
    trainer = make_trainer(*given, **LOGGED, report_to=["tensorboard"])
    if added == "later":
        trainer.add_callback(MemoryWatchdog)
    trainer.train()

    events = EventAccumulator(str(next(tmp_path.rglob("events.out.tfevents.*")).parent))
    events.Reload()
    shown = {name: {e.step: e.value for e in events.Scalars(f"train/{name}")} for name in NAMES}
    assert shown == {
        name: {step: pytest.approx(row[name]) for step, row in rows(trainer).items()}
        for name in NAMES
    }
    assert len(shown["memory/peak_gib"]) == 4


def test_what_was_before_the_training_is_not_charted(make_trainer, simgpu) -> None:
    trainer = make_trainer(MemoryWatchdog(), **LOGGED)
    torch.zeros(
        200 * MIB, dtype=torch.uint8, device=trainer.args.device
    )  # as loading a model takes and frees
    trainer.train()

    assert all(row["memory/peak_gib"] < 100 / 1024 for row in rows(trainer).values())


def test_all_releases_between_two_lines_count_whoever_made_them(
    make_trainer, simgpu, tmp_path
) -> None:
    timeline = Timeline()  # of the watchdog's own, while releases are in that of the run
    release = CudaCacheCallback(interval=1, min_reclaimable_fraction=0)
    callbacks = (at("step_begin", thrash, 4, 5, 6, 7), MemoryWatchdog(timeline=timeline), release)
    trainer = make_trainer(*callbacks, logging_strategy="steps", logging_steps=4)
    trainer.train()

    flushes = read_entries(tmp_path / "run", Flush)
    assert [flush.step for flush in flushes] == [1, 2, 3, 4, 5, 6, 7, 8]
    for line, steps in ((4, (1, 2, 3, 4)), (8, (5, 6, 7, 8))):
        seconds = sum(flush.seconds for flush in flushes if flush.step in steps)
        assert rows(trainer)[line]["memory/flush_seconds"] == pytest.approx(seconds, abs=1e-5)
    assert rows(trainer)[4]["memory/alloc_retries"] == 0
    begin, *_, last = [
        entry.reading.num_alloc_retries for entry in timeline if isinstance(entry, Sample)
    ]
    assert rows(trainer)[8]["memory/alloc_retries"] == last - begin > 0


def test_what_a_neighbour_takes_is_foreign(make_trainer, simgpu) -> None:
    def intrude(_) -> None:
        simgpu.card().hold(4242, 80 * MIB, "python infer.py")

    trainer = make_trainer(at("step_begin", intrude, 3), MemoryWatchdog(), **LOGGED)
    trainer.train()

    assert [row["memory/foreign_gib"] * 1024 for row in rows(trainer).values()] == [0, 80, 80, 80]


def test_a_line_without_a_look_since_the_one_before_has_none(make_trainer) -> None:
    trainer = make_trainer(MemoryWatchdog(every_steps=4), logging_strategy="steps", logging_steps=1)
    trainer.train()

    assert list(rows(trainer)) == [4, 8]


def test_where_the_watchdog_goes_in_front_every_callback_still_hears_each_event_once(
    make_trainer,
) -> None:
    class Hears(TrainerCallback):
        def __init__(self) -> None:
            self.heard: list[str] = []

        def on_train_begin(self, args, state, control, **kwargs):
            self.heard.append("begin")

        def on_log(self, args, state, control, logs=None, **kwargs):
            self.heard.append("numbers" if numbers(logs) else "no numbers")

    before, behind = Hears(), Hears()
    watchdog = MemoryWatchdog()
    trainer = make_trainer(
        before,
        watchdog,
        behind,
        logging_strategy="steps",
        logging_steps=4,
        report_to=["tensorboard"],
    )
    for _ in range(2):
        trainer.train()

    line = ["begin", "numbers", "numbers", "no numbers"]
    assert before.heard == behind.heard == line * 2
    assert trainer.callback_handler.callbacks[1] is watchdog
    assert trainer.callback_handler.callbacks.count(watchdog) == 1


def test_without_trackers_it_stays_where_it_was_put(make_trainer) -> None:
    mine, watchdog = TrainerCallback(), MemoryWatchdog()
    trainer = make_trainer(mine, watchdog, **LOGGED)
    trainer.train()

    assert trainer.callback_handler.callbacks[1:3] == [mine, watchdog]


def test_a_watchdog_inside_another_object_says_that_trackers_do_not_hear_it(
    make_trainer, caplog
) -> None:
    class Envelope:
        """Passes every event on, as people do who switch callbacks on and off."""

        def __init__(self, inside) -> None:
            self.inside = inside

        def __getattr__(self, name):
            return getattr(self.inside, name)

    caplog.set_level("INFO", logger="trainer_plugins")
    trainer = make_trainer(Envelope(MemoryWatchdog()), **LOGGED)
    trainer.train()

    assert list(rows(trainer)) == [2, 4, 6, 8]
    assert caplog.text.count("metrics go only to state.log_history") == 1


def test_prometheus_finds_a_whole_file(make_trainer, simgpu, tmp_path) -> None:
    folder = tmp_path / "node_exporter"
    watchdog = MemoryWatchdog(prometheus_dir=folder)
    trainer = make_trainer(
        at("step_begin", takes(20)),
        CudaCacheCallback(interval=1, min_reclaimable_fraction=0),
        watchdog,
        **LOGGED,
    )
    trainer.train()

    assert [path.name for path in folder.iterdir()] == ["trainer_plugins-rank-0.prom"]
    families = list(
        text_string_to_metric_families((folder / "trainer_plugins-rank-0.prom").read_text())
    )
    samples = {sample.name: sample for family in families for sample in family.samples}
    assert all(sample.labels == {"rank": "0", "device": "simgpu:0"} for sample in samples.values())
    assert {family.type for family in families if family.name.endswith(("_bytes", "_ratio"))} == {
        "gauge"
    }
    assert all(family.documentation for family in families)
    value = {
        name.removeprefix("trainer_plugins_memory_"): sample.value
        for name, sample in samples.items()
    }
    last = rows(trainer)[8]
    assert value == {
        "peak_bytes": last["memory/peak_gib"] * GIB,
        "reserved_bytes": last["memory/reserved_gib"] * GIB,
        "foreign_bytes": 0,
        "pressure_ratio": last["memory/pressure_fraction"],
        "alloc_retries_total": 0,
        "flush_seconds_total": pytest.approx(
            sum(row["memory/flush_seconds"] for row in rows(trainer).values())
        ),
    }
    assert value["flush_seconds_total"] > 0


def test_a_folder_that_cannot_be_written_is_said_once(make_trainer, tmp_path, caplog) -> None:
    (tmp_path / "taken").write_text("a user's file")
    trainer = make_trainer(MemoryWatchdog(prometheus_dir=str(tmp_path / "taken")), **LOGGED)
    trainer.train()

    assert list(rows(trainer)) == [2, 4, 6, 8]
    assert caplog.text.count("memory metrics could not be written to") == 1
    assert (tmp_path / "taken").read_text() == "a user's file"


def test_a_draft_of_another_name_and_a_symlink_in_its_place_harm_nobody(
    make_trainer, tmp_path
) -> None:
    folder, victim = tmp_path / "node_exporter", tmp_path / "of another user"
    folder.mkdir()
    victim.write_text("what is in it")
    for name in ("trainer_plugins-rank-0.prom.tmp", "trainer_plugins-rank-0.prom"):
        (folder / name).symlink_to(victim)
    before = os.umask(0o027)
    try:
        make_trainer(MemoryWatchdog(prometheus_dir=folder), **LOGGED).train()
    finally:
        os.umask(before)

    assert victim.read_text() == "what is in it"
    file = folder / "trainer_plugins-rank-0.prom"
    assert (
        file.lstat().st_mode & 0o7777 == 0o640
    )  # as the umask has it: a temporary file's own mode hides it
    assert file.read_text().startswith("# HELP")
    assert sorted(os.listdir(folder)) == [file.name, f"{file.name}.tmp"]


def test_the_name_of_a_device_is_a_label_whatever_is_in_it(make_trainer, tmp_path) -> None:
    class Named(HostDevice):
        name = 'a "card" \\ of\ntwo lines'

    make_trainer(MemoryWatchdog(prometheus_dir=tmp_path, device=Named()), **LOGGED).train()

    families = text_string_to_metric_families(
        (tmp_path / "trainer_plugins-rank-0.prom").read_text()
    )
    assert {sample.labels["device"] for family in families for sample in family.samples} == {
        Named.name
    }


def test_a_folder_taken_away_and_a_full_disk_end_nothing(make_trainer, tmp_path, caplog) -> None:
    folder = tmp_path / "node_exporter"

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(num_bytes: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))

    trainer = make_trainer(
        at("log", lambda _: shutil.rmtree(folder), 4),
        at("log", lambda _: limit(100), 6, 8),
        MemoryWatchdog(prometheus_dir=folder),
        at("log", lambda _: limit(limits[0])),  # for what others write
        **LOGGED,
    )
    trainer.train()

    assert list(rows(trainer)) == [2, 4, 6, 8]
    assert caplog.text.count("memory metrics could not be written to") == 1
    assert os.listdir(folder) == [
        "trainer_plugins-rank-0.prom"
    ]  # of step 4, whole, and no draft of a later one
    assert "flush_seconds_total{" in (folder / "trainer_plugins-rank-0.prom").read_text()


# The trackers below are large: `pip install trackio mlflow-skinny sqlalchemy alembic wandb` brings
# them.


def test_trackio_shows_them(make_trainer, tmp_path, monkeypatch) -> None:
    for name in ("trackio.sqlite_storage", "trackio.utils"):
        monkeypatch.setattr(pytest.importorskip(name), "TRACKIO_DIR", tmp_path / "trackio")
    trainer = make_trainer(MemoryWatchdog(), **LOGGED, report_to=["trackio"], project="mine")
    trainer.train()

    with sqlite3.connect(tmp_path / "trackio" / "mine.db") as database:
        shown = [
            json.loads(text)
            for (text,) in database.execute("SELECT metrics FROM metrics ORDER BY id")
        ]
    assert {
        row["train/global_step"]: {name: row[f"train/{name}"] for name in NAMES}
        for row in shown
        if "train/loss" in row
    } == rows(trainer)


def test_mlflow_shows_them(make_trainer, tmp_path, monkeypatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    monkeypatch.chdir(tmp_path)  # where it puts its artifacts
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    trainer = make_trainer(MemoryWatchdog(), **LOGGED, report_to=["mlflow"])
    trainer.train()

    client = mlflow.MlflowClient()
    (run,) = client.search_runs(["0"])
    shown = {
        name: {m.step: m.value for m in client.get_metric_history(run.info.run_id, name)}
        for name in NAMES
    }
    assert shown == {
        name: {step: row[name] for step, row in rows(trainer).items()} for name in NAMES
    }


def test_wandb_keeps_them_for_its_next_sync(make_trainer, tmp_path, monkeypatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    trainer = make_trainer(MemoryWatchdog(), **LOGGED, report_to=["wandb"])
    trainer.train()
    wandb.teardown()  # its service writes the file
    (file,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    kept = file.read_bytes()
    for row in rows(trainer).values():
        for name, value in row.items():
            assert f"train/{name}".encode() in kept
            assert json.dumps(value).encode() in kept
