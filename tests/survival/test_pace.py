"""The limit grows again where it is too low, and shrinks where the allocator thrashes."""

import math

import pytest
import torch

from tests.models import tiny_llama, token_rows
from tests.survival.failing import small_trainer
from trainer_plugins import survive_oom
from trainer_plugins.survival.pace import Pace
from trainer_plugins.units import MIB


def trained(tmp_path, simgpu, capacity_mib: int, steps: int, model):
    torch.accelerator.empty_cache()
    simgpu.set_capacity(capacity_mib * MIB)
    trainer = small_trainer(
        tmp_path, model, steps=steps, train_dataset=token_rows(64 * steps, 64), data_collator=None,
        use_cpu=False, per_device_train_batch_size=64, gradient_accumulation_steps=1,
    )  # fmt: skip
    survive_oom(trainer, plan_first=False)
    trainer.train()
    return trainer


@pytest.mark.parametrize(("capacity_mib", "last"), [(12, [21, 21, 22]), (10, [16, 16, 16, 16])])
def test_a_limit_grows_and_goes_back_where_more_does_not_fit(tmp_path, simgpu, monkeypatch, capacity_mib, last) -> None:
    monkeypatch.setattr(Pace.__init__, "__defaults__", (0.0, math.inf, 1, 0, False, False, 0, 0, 0))  # each clean step
    rows: list[int] = []
    model = tiny_llama()
    model.register_forward_pre_hook(lambda *args: rows.append(len(args[-1]["input_ids"])), with_kwargs=True)

    trainer = trained(tmp_path, simgpu, capacity_mib, 12, model)

    assert trainer.state.global_step == 12
    assert rows[:8] == [64, *rows[1:5], 32, 16, 16], "halved twice; between them it was measured"
    assert 22 in rows, "it grew"
    assert rows[-len(last) :] == last


def test_a_thrashing_allocator_is_given_room() -> None:
    pace = Pace()
    for num_retries, limit, is_thrashing in (
        (0, math.inf, False),
        (1, math.inf, False),
        (3, 2048, True),
        (3, 2048, False),
    ):
        pace.computed(4096, is_divided=False)
        assert pace.after_step(math.inf if num_retries < 3 else limit, num_retries) == (limit, is_thrashing)
