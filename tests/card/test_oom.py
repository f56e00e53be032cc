"""CUDA's own error: its words, what is written down of it, and what is read out of that."""

import os
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from transformers import TrainerCallback

from tests.card.shared import (
    CARD,
    ON_A_CARD,
    Lengths,
    card_of,
    folder,
    is_this_process_listed,
    total_bytes,
    wide_llama,
)
from trainer_plugins import OOMReporter
from trainer_plugins.cli import app
from trainer_plugins.oom import classify
from trainer_plugins.record.oom_record import OomRecord, read_oom_records
from trainer_plugins.units import GIB, KIB, MIB

pytestmark = ON_A_CARD

SMALL = GIB
NUM_ROWS, LENGTH = 64, 512
"""Logits of a batch take 512 MiB, and their logarithms as much again."""


def explained(*arguments: object) -> str:
    done = CliRunner().invoke(app, ["explain", "--verbose", *map(str, arguments)])
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.parametrize("asked", [1 << 45, 5 * (1 << 40), (1 << 40) + 512 * MIB])
def test_what_was_asked_for_is_read_from_torchs_words(asked: int, tmp_path) -> None:
    """torch writes two digits of a GiB."""
    with pytest.raises(torch.OutOfMemoryError) as raised:
        torch.empty(asked, dtype=torch.uint8, device=CARD)
    words = str(raised.value)
    assert words.startswith("CUDA out of memory. Tried to allocate ")
    found = classify(raised.value)
    assert found is not None
    assert (found.source, found.is_certain, found.fatal) == ("allocator", True, "")
    assert found.is_survivable
    assert found.device == 0
    assert found.requested_bytes == pytest.approx(asked, abs=GIB // 100)
    assert found.total_bytes == pytest.approx(total_bytes(), abs=GIB // 100)
    assert found.free_bytes == pytest.approx(torch.cuda.mem_get_info()[0], abs=GIB // 4)
    assert found.allocated_bytes == pytest.approx(torch.cuda.memory_allocated(), abs=MIB)

    log = tmp_path / "train.log"
    log.write_text(f"Traceback (most recent call last):\ntorch.OutOfMemoryError: {words}\n")
    assert found.requested_bytes == getattr(classify(log.read_text()), "requested_bytes", None)
    said = explained(log)
    assert "Cause" in said
    assert f"{asked / 2**40:.2f} TiB" in said or f"{asked / 2**30:.2f} GiB" in said, said


def died(make_trainer, *callbacks: TrainerCallback, **kwargs: Any) -> tuple[Any, str]:
    """Train on a card that is too small for the second batch."""
    trainer = make_trainer(*callbacks, model=wide_llama(), max_steps=3, **kwargs)
    trainer.data_collator = Lengths(64, 64, LENGTH, num_rows=NUM_ROWS)
    assert str(trainer.args.device) == CARD
    with card_of(SMALL), pytest.raises(torch.OutOfMemoryError) as raised:
        trainer.train()
    return trainer, str(raised.value)


def record_of(trainer: Any) -> OomRecord:
    (record,) = read_oom_records(Path(trainer.args.output_dir))
    return record


def test_the_record_of_cudas_own_error(make_trainer) -> None:
    trainer, words = died(make_trainer, OOMReporter())
    record = record_of(trainer)
    assert (record.call, record.moment, record.step) == ("train", "train", 2)
    assert record.part in ("forward", "backward")
    assert record.error_class == "OutOfMemoryError"
    error = record.error
    assert (error.source, error.is_certain, error.device) == ("allocator", True, 0)
    assert error.text.partition(": ")[2].startswith(words[:60])
    (asked, unit) = re.findall(r"Tried to allocate ([\d.]+) ([KMG]iB)", words)[0]
    assert error.requested_bytes == round(float(asked) * {"KiB": KIB, "MiB": MIB, "GiB": GIB}[unit])
    assert error.requested_bytes >= 64 * MIB
    assert error.limit_bytes == pytest.approx(SMALL, abs=MIB), "torch says how much is allowed"
    reading = record.reading
    assert reading is not None
    assert reading.device == CARD
    assert reading.num_alloc_retries >= 1, "torch released its cache before it gave up"
    assert reading.allocated_bytes <= reading.reserved_bytes <= SMALL
    # When the record is written the frames of the failed step still hold their tensors.
    alive = record.alive
    assert alive is not None
    counted = sum(alive.category_bytes.values()) + alive.hidden_bytes
    assert counted == pytest.approx(reading.allocated_bytes, rel=0.01)
    assert alive.hidden_bytes < 0.2 * reading.allocated_bytes, "workspaces of cuBLAS"
    weights = sum(each.nbytes for each in trainer.model.parameters())
    assert alive.category_bytes["parameter"] == weights
    assert alive.category_bytes["optimizer"] >= 2 * weights
    assert [(each.name, each.num_bytes) for each in alive.models][:1] == [
        ("LlamaForCausalLM", weights)
    ]
    assert record.batch["input_ids"].shape == (NUM_ROWS, LENGTH)
    if is_this_process_listed():
        (own,) = [each for each in record.processes or () if each.is_own]
        assert own.pid == os.getpid()
        assert (own.used_bytes or 0) >= reading.reserved_bytes

    said = explained(trainer.args.output_dir, "--no-predict")
    assert "[certain: logits-loss]" in said, said
    assert "although memory was free" not in said, "the card has room, but not for this process"
    assert "step 2" in said


def test_a_snapshot_is_taken_inside_the_throw_and_names_the_place(make_trainer) -> None:
    class Takes(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 2:
                held = torch.empty(700 * MIB, dtype=torch.uint8, device=args.device)
                self.takes_more(held)

        def takes_more(self, held: torch.Tensor) -> None:
            torch.empty(600 * MIB, dtype=torch.uint8, device=held.device)

    reporter = OOMReporter(snapshot=True)
    trainer = make_trainer(Takes(), reporter, model=wide_llama(), max_steps=3)
    with card_of(SMALL), pytest.raises(torch.OutOfMemoryError, match=r"allocate 600\.00 MiB"):
        trainer.train()
    record = record_of(trainer)
    path = folder(trainer) / record.snapshot
    assert path.suffix == ".pickle"
    snapshot = pickle.loads(path.read_bytes())
    (events,) = [trace for trace in snapshot["device_traces"] if trace]
    ooms = [event for event in events if event["action"] == "oom"]
    assert [event["size"] for event in ooms] == [600 * MIB]
    live = [
        block["requested_size"]
        for segment in snapshot["segments"]
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    ]
    assert 700 * MIB in live, "taken before the error unwound the frame that holds it"
    assert list(folder(trainer).glob(".*")) == []

    said = explained(path)
    assert "asked for 600.0 MiB" in said, said
    assert "test_oom.py" in said
    assert "takes_more" in said
    assert "700.0 MiB" in said
    # A training after it records nothing any more.
    assert not torch._C._cuda_isHistoryEnabled()


def test_a_record_of_an_evaluation_says_so(make_trainer) -> None:
    trainer = make_trainer(OOMReporter(), model=wide_llama())
    trainer.data_collator = Lengths(LENGTH, num_rows=NUM_ROWS)
    with card_of(SMALL // 4), pytest.raises(torch.OutOfMemoryError):
        trainer.evaluate()
    record = record_of(trainer)
    assert (record.call, record.moment) == ("evaluate", "eval")
    assert record.error.requested_bytes is not None
    assert record.error.requested_bytes >= 32 * MIB
