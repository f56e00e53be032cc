"""What is done is said: once on the console and in the timeline, and as a number in the logs."""

import logging

import pytest
import torch
import transformers
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.models import tiny_llama, token_rows
from tests.survival.failing import Run, small_trainer
from tests.survival.test_attach import remarks
from tests.written import read_findings
from trainer_plugins import protect, survive_oom
from trainer_plugins.units import MIB

IS_5 = not transformers.__version__.startswith("4.")


def on_a_small_card(tmp_path, simgpu, **kwargs):
    torch.accelerator.empty_cache()
    simgpu.set_capacity(6 * MIB)
    settings = {
        "per_device_train_batch_size": 64,
        "gradient_accumulation_steps": 1,
        "steps": 3,
        **kwargs,
    }
    return small_trainer(
        tmp_path,
        tiny_llama(),
        train_dataset=token_rows(192, 64),
        data_collator=None,
        use_cpu=False,
        **settings,
    )


@pytest.mark.parametrize(
    "attach", [survive_oom, lambda trainer: protect(trainer, preset="survive")]
)
def test_dividing_beforehand_is_said_once_and_counted(
    tmp_path, simgpu, monkeypatch, caplog, attach
) -> None:
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    # transformers 4 has an argument in place of the variable
    place = {} if IS_5 else {"logging_dir": str(tmp_path / "board")}
    trainer = on_a_small_card(tmp_path, simgpu, report_to=["tensorboard"], **place)
    attach(trainer)
    trainer.train()

    warned = [
        r.getMessage()
        for r in caplog.records
        if r.levelno >= logging.WARNING and "trainer_plugins" in r.name
    ]
    (told,) = [line for line in warned if "[micro-batches-divided]" in line]
    assert told.startswith(
        "step 1: [micro-batches-divided] micro-batches that do not fit are computed in pieces: 64 rows"
    )
    assert "64 rows (4096 tokens, including padding) in " in told
    assert "a rehearsal, an earlier failure or rows_at_once set the limit" in told
    assert not [line for line in warned if "survived" in line], "nothing failed"
    assert [entry.step for entry in remarks(tmp_path, "micro-batches-divided")] == [1]
    logged = [
        logs["memory/divided_micro_batches"] for logs in trainer.state.log_history if "loss" in logs
    ]
    assert logged == [1, 1, 1]
    (file,) = (tmp_path / "board").rglob("events.*")
    events = EventAccumulator(str(file)).Reload()
    tags = events.Tags()["scalars"]
    (tag,) = [tag for tag in tags if tag.endswith("memory/divided_micro_batches")]
    assert [event.value for event in events.Scalars(tag)] == [1, 1, 1]


def test_one_row_that_does_not_fit_is_not_told_to_be_fewer(tmp_path, simgpu) -> None:
    torch.accelerator.empty_cache()
    simgpu.set_capacity(2 * MIB)
    for num_rows in (1, 64):
        trainer = small_trainer(
            tmp_path / str(num_rows), tiny_llama(vocab_size=512), train_dataset=token_rows(64, 256), data_collator=None,
            use_cpu=False, per_device_train_batch_size=num_rows,
        )  # fmt: skip
        survive_oom(trainer, plan_first=False)
        tried = (
            r"nothing smaller to try than 1 row \(256 tokens, including padding\), and nothing left"
            r" to switch on \(checkpointing and offload on\)"
        )
        with pytest.raises(
            torch.OutOfMemoryError, match=rf"(?s)^CUDA out of memory. Tried to allocate .*{tried}"
        ):
            trainer.train()
        assert len(read_findings(tmp_path / str(num_rows))) == 1
        (told,) = remarks(tmp_path / str(num_rows), "out-of-memory-refused")
        assert told.finding.remedy.startswith("Remaining options: shorter sequences")
        assert "per_device_train_batch_size" not in told.finding.remedy


def test_an_error_that_is_not_retried_goes_on_and_the_reason_is_said(tmp_path, caplog) -> None:
    """Its numbers contradict each other, so asking for less need not help."""
    words = (
        "CUDA out of memory. Tried to allocate 594.00 MiB. GPU 0 has a total capacity of "
        "200.00 GiB of which 179.98 GiB is free."
    )
    trainer = small_trainer(tmp_path, steps=1)
    survive_oom(trainer)

    with pytest.raises(torch.OutOfMemoryError, match=r"179\.98 GiB is free"):
        Run(trainer, {0: [20]}, error=torch.OutOfMemoryError(words))

    (said,) = [r.getMessage() for r in caplog.records if "does not retry" in r.getMessage()]
    assert "numbers contradict each other" in said
    assert trainer.state.global_step == 0
