"""Streaming and surviving together: the last rung, and an OOM anywhere in a step with a streamed base."""

import gc
import inspect

import pytest
import torch

from tests.models import checkpointing
from tests.streaming.lora import LARGE, adapted, base, stream, trainer
from tests.survival.failing import Run, off_by_steps
from trainer_plugins import StreamBase, SurviveOOM, survive_oom
from trainer_plugins.survival.memo import memo_of
from trainer_plugins.units import MIB

ALL = ("checkpointing", "offload", "stream")


@pytest.mark.all
def test_a_run_that_dies_before_its_first_row_trains(simgpu, tmp_path, caplog) -> None:
    simgpu.set_capacity(20 * MIB)
    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        trainer(tmp_path, SurviveOOM(), model=adapted(base(**LARGE)))
    gc.collect()

    trained = trainer(tmp_path, SurviveOOM(ladder=ALL), model=adapted(base(**LARGE)))
    trained.train()

    assert trained.state.global_step == 5
    assert stream(trained).num_layers == 12
    assert "waits in main memory" in caplog.text
    assert "copies" in caplog.text


def test_a_run_that_dies_at_its_first_row_trains(simgpu, tmp_path, caplog) -> None:
    def run(ladder):
        one = {"per_device_train_batch_size": 1}
        running = trainer(tmp_path, model=adapted(base(**LARGE)), **one)
        caplog.clear()
        with survive_oom(running, ladder=ladder):
            running.train()
            return running.state.global_step, memo_of(running).rungs

    simgpu.set_capacity(38 * MIB)
    with pytest.raises(torch.OutOfMemoryError, match="nothing left to switch on"):
        run(("checkpointing", "offload"))
    gc.collect()
    torch.accelerator.empty_cache()

    assert run(ALL) == (5, ["checkpointing", "offload", "stream"])
    assert "the frozen base" in caplog.text
    assert "over the bus" in caplog.text


def test_it_is_asked_for_by_name(simgpu, tmp_path) -> None:
    assert "stream" not in inspect.signature(SurviveOOM).parameters["ladder"].default
    with pytest.raises(ValueError, match="'stream'"):
        SurviveOOM(ladder=("streaming",))


def one_step(folder, checkpoints: bool, fail_at=None) -> Run:
    """One row, which is computed again as it is: dropout draws other numbers for pieces."""
    lean = checkpointing(reentrant=False) if checkpoints else {}
    one = {"max_steps": 1, "per_device_train_batch_size": 1}
    model = adapted(base(num_hidden_layers=3))
    running = trainer(folder, StreamBase(1), model=model, **one, **lean)
    with survive_oom(running, plan_first=False):
        ran = Run(running, fail_at)
    assert stream(running).num_layers == 3
    return ran


@pytest.mark.all(unless=lambda checkpoints: checkpoints)
@pytest.mark.parametrize("checkpoints", [False, True])
def test_an_oom_at_any_allocation_of_a_step(simgpu, tmp_path, checkpoints) -> None:
    whole = one_step(tmp_path, checkpoints)
    num = whole.num_allocations[0]
    for position in range(1, num + 1, num // 12):
        survived = one_step(tmp_path, checkpoints, {0: [position]})
        assert survived.allocations.num_failed == 1
        assert off_by_steps(survived.gradients, whole.gradients) == 0


class Growths:
    """Counts how often a layer's weight takes memory on the card, and lets one of them fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fail_at: int) -> None:
        self.num = self.num_failed = 0
        resize = torch.UntypedStorage.resize_

        def counted(storage: torch.UntypedStorage, num_bytes: int) -> object:
            self.num += num_bytes > 0
            if num_bytes and self.num == fail_at:
                self.num_failed += 1
                raise torch.OutOfMemoryError(f"CUDA out of memory. Number {self.num}.")
            return resize(storage, num_bytes)

        monkeypatch.setattr(torch.UntypedStorage, "resize_", counted)


@pytest.mark.all
@pytest.mark.parametrize("checkpoints", [False, True])
def test_an_oom_in_any_fetch_of_a_step(simgpu, tmp_path, checkpoints) -> None:
    whole = one_step(tmp_path, checkpoints)
    with pytest.MonkeyPatch.context() as patch:
        growths = Growths(patch, fail_at=-1)
        one_step(tmp_path, checkpoints)
    in_a_step = (2 * (3 - 1) + 1) * 7  # weights
    assert growths.num == in_a_step + 2 * 7  # in the end all weights are read, to be compared

    for position in range(1, in_a_step + 1, 3):
        with pytest.MonkeyPatch.context() as patch:
            failing = Growths(patch, position)
            survived = one_step(tmp_path, checkpoints)
        assert failing.num_failed == 1
        assert off_by_steps(survived.gradients, whole.gradients) == 0
