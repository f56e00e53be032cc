"""Readings of the card that fail, with whatever error: said once, and training goes on and survives."""

import pytest
import torch
from transformers import TrainerCallback

from tests.models import tiny_llama, token_rows
from tests.survival.failing import small_trainer
from trainer_plugins import survive_oom
from trainer_plugins.survival.memo import memo_of
from trainer_plugins.units import MIB


class Breaks(TrainerCallback):
    """torch's own counters fail from some moment on."""

    def __init__(self, monkeypatch, moment: str, error: Exception) -> None:
        def fail(index):
            raise type(error)(
                *error.args
            )  # anew: raised again, one would keep the frames of every time

        setattr(
            self,
            moment,
            lambda *args, **kwargs: monkeypatch.setattr(
                torch._C, "_accelerator_getDeviceStats", fail
            ),
        )


@pytest.mark.parametrize("moment", ["on_train_begin", "on_step_begin", "on_step_end"])
@pytest.mark.parametrize(
    "error", [RuntimeError("CUDA error: unknown error"), OSError("/dev/nvidiactl"), KeyError("all")]
)
@pytest.mark.all(but=3)
def test_a_reading_that_fails_does_not_end_training(
    tmp_path, simgpu, monkeypatch, caplog, moment, error
) -> None:
    torch.accelerator.empty_cache()
    simgpu.set_capacity(6 * MIB)
    trainer = small_trainer(
        tmp_path, tiny_llama(), steps=3, train_dataset=token_rows(192, 64), data_collator=None, use_cpu=False,
        per_device_train_batch_size=64, gradient_accumulation_steps=1,
    )  # fmt: skip
    trainer.add_callback(Breaks(monkeypatch, moment, error))
    survive_oom(trainer)
    trainer.train()

    assert trainer.state.global_step == 3
    assert memo_of(trainer).limit < 64 * 64, "found by halving, or by a rehearsal before it broke"
    assert len(
        [r for r in caplog.records if "no longer reads the memory of simgpu:0" in r.message]
    ) == (moment != "on_train_begin")
