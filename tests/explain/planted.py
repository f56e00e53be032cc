"""A run that dies of a planted cause, what is printed of it, and the first remedy as one reads it."""

import gc
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from click.testing import CliRunner
from transformers import Trainer, TrainerCallback

from tests.explain.stated import check_figures
from tests.models import token_rows
from trainer_plugins import MemoryWatchdog, OOMReporter
from trainer_plugins.cli import app
from trainer_plugins.record.history import read_history
from trainer_plugins.record.timeline import Sample
from trainer_plugins.testing import simgpu
from trainer_plugins.units import MIB


@dataclass(frozen=True)
class Told:
    """What `trainer-plugins explain` prints."""

    code: str
    """Of the first cause."""

    do: str
    """The line that is marked to be done first."""

    text: str
    """All of it, in one line."""

    needed_bytes: int | None
    """What the run would have needed with it, as it foretells; None if it does not."""

    grade: str
    """Where that is from."""

    @property
    def flags(self) -> dict[str, Any]:
        """The first remedy as TrainingArguments get it."""
        found = re.findall(r"--(\w+) (\S+)", self.do)
        assert found, self.do
        return {name: _value(text) for name, text in found}


def _value(text: str) -> object:
    try:
        return json.loads(text.lower())
    except ValueError:
        return text


def explained(folder: Path, predicts: bool = False) -> Told:
    """Type the command, and read what it prints."""
    command = ["explain", str(folder), *([] if predicts else ["--no-predict"])]
    shown = CliRunner().invoke(app, [*command, "--verbose"])
    assert shown.exit_code == 0, shown.output
    value = json.loads(CliRunner().invoke(app, [*command, "--json"]).stdout)
    for each in value["causes"]:
        check_figures(each)
    remedy = value["remedies"][0]
    assert remedy["cause"] == value["causes"][0]["code"]
    text = " ".join(shown.stdout.split())  # a terminal folds it anywhere
    assert f"Try {remedy['do']} {remedy['effect'][:1].upper()}{remedy['effect'][1:]}." in text
    assert remedy["fits"] is not False, remedy
    code, needed_bytes = value["causes"][0]["code"], remedy["predicted_peak_bytes"]
    return Told(code, remedy["do"], text, needed_bytes, remedy["grade"])


def empty_card(mib: int) -> None:
    """Take back what the run before it left, and make the card so large."""
    gc.collect()
    torch.accelerator.empty_cache()
    simgpu.set_capacity(mib * MIB)


def taken_bytes(folder: Path, since_seconds: float) -> int:
    """The most that tensors held since then, by the timeline of the last run of a folder."""
    (entries,) = read_history(folder).runs[-1].timelines.values()
    samples = [each for each in entries if isinstance(each, Sample)]
    since = [each.reading for each in samples if each.time_seconds > since_seconds]
    return max(each.peak_allocated_bytes for each in since)


def run(
    trainer: Trainer, method: str = "train", predicts: bool = False, **options: object
) -> Told | None:
    """Let a Trainer run; None if it ends."""
    try:
        getattr(trainer, method)(**options)
    except RuntimeError:  # that of torch for a full card, and that for a dead worker
        return explained(Path(trainer.args.output_dir), predicts)
    return None


def watched(*callbacks: TrainerCallback) -> list[TrainerCallback]:
    return [*callbacks, MemoryWatchdog(), OOMReporter()]


def with_rows(trainer: Trainer, num_rows: int, length: int) -> Trainer:
    trainer.train_dataset = trainer.eval_dataset = token_rows(num_rows, length)
    return trainer
