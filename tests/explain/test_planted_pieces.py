"""Planted fragmentation: enough is free, in pieces, and what is marked first, typed before the run, lets it end.

torch reads the settings of its allocator once, so the run is a script in a process of its own.
"""

import shlex
import sys
from pathlib import Path

import pytest

from tests import processes
from tests.explain.planted import explained, taken_bytes
from tests.testing.test_simgpu import _needs_simgpu, environment  # noqa: F401
from trainer_plugins.explain.run import explain_run
from trainer_plugins.record.oom_record import read_oom_records
from trainer_plugins.units import MIB

SCRIPT = """
import sys
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments
from tests.models import tiny_llama, token_rows
from trainer_plugins import MemoryWatchdog, OOMReporter
from trainer_plugins.units import MIB

def taken(mib):
    return torch.empty(mib * MIB, dtype=torch.uint8, device="simgpu")

class Scored(Trainer):
    def compute_loss(self, *args, **kwargs):
        scores = taken(60)
        return super().compute_loss(*args, **kwargs)

class Collects(TrainerCallback):
    # Of each table it keeps a part, which comes to lie where the table was; the next is a little longer.
    kept = []

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 2:
            for longer in (2, 4, 6, 8):
                table = taken(40 + longer)
                del table
                self.kept.append(taken(24))

args = TrainingArguments(sys.argv[1], max_steps=4, per_device_train_batch_size=2, report_to="none",
                         save_strategy="no", disable_tqdm=True, dataloader_pin_memory=False)
Scored(tiny_llama(), args, train_dataset=token_rows(),
       callbacks=[Collects(), MemoryWatchdog(), OOMReporter()]).train()
"""


@pytest.fixture
def trained(tmp_path):
    """Trains on a card of 200 MiB, after what is typed; whether it ended, and where it wrote."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)

    def train(name: str, typed: str = "") -> tuple[bool, Path]:
        folder = tmp_path / name
        simgpu = ["-m", "trainer_plugins.testing.simgpu", "--capacity", "200MiB"]
        call = shlex.join([sys.executable, *simgpu, str(script), str(folder)])
        clean = {name: text for name, text in environment().items() if "ALLOC_CONF" not in name}
        done = processes.run(["bash", "-c", f"{typed}\n{call}"], cwd=tmp_path, environ=clean)
        assert done.returncode == 0 or "OutOfMemoryError" in done.stderr, done.stderr[-3000:]
        return done.returncode == 0, folder

    return train


@pytest.mark.all
def test_what_is_free_lies_in_pieces(trained) -> None:
    ended, folder = trained("in pieces")
    assert not ended
    (record,) = read_oom_records(folder)
    error = record.error
    assert error.requested_bytes == 60 * MIB
    assert error.free_bytes is not None
    assert error.unused_bytes is not None
    assert error.free_bytes < error.requested_bytes < error.free_bytes + error.unused_bytes

    said = explained(folder)
    assert said.code == "fragmentation"
    assert "enough memory was free, but only in small pieces" in said.text
    assert said.do.startswith("export ")
    ended, folder = trained("joined", said.do)
    assert ended
    assert said.needed_bytes is not None
    assert taken_bytes(folder, 0) <= 1.1 * said.needed_bytes
    assert explain_run(folder).causes == ()
