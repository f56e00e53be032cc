"""Readings of the card that fail, with whatever error: said once, and training goes on and survives."""

import pytest
import torch

from tests.events import at
from tests.survival.test_words import on_a_small_card
from trainer_plugins import survive_oom
from trainer_plugins.survival.memo import memo_of


@pytest.mark.parametrize("moment", ["train_begin", "step_begin", "step_end"])
@pytest.mark.parametrize(
    "error", [RuntimeError("CUDA error: unknown error"), OSError("/dev/nvidiactl"), KeyError("all")]
)
@pytest.mark.all(but=3)
def test_a_reading_that_fails_does_not_end_training(
    tmp_path, simgpu, monkeypatch, caplog, moment, error
) -> None:
    def fail(index):
        # Anew: raised again, one would keep the frames of every time.
        raise type(error)(*error.args)

    def break_counters(_) -> None:
        monkeypatch.setattr(torch._C, "_accelerator_getDeviceStats", fail)

    trainer = on_a_small_card(tmp_path, simgpu)
    trainer.add_callback(at(moment, break_counters))
    survive_oom(trainer)
    trainer.train()

    assert trainer.state.global_step == 3
    assert memo_of(trainer).limit < 64 * 64, "found by halving, or by a rehearsal before it broke"
    assert len(
        [r for r in caplog.records if "no longer reads the memory of simgpu:0" in r.message]
    ) == (moment != "train_begin")
