"""Streaming by an option, with no change to the script: it acts before the model is on the card."""

import gc

import pytest
import torch

from tests.streaming.lora import LARGE, adapted, are_equal, base, learn, learned, stream, trainer
from trainer_plugins import (
    MemoryArguments,
    StrategyInForce,
    StreamBase,
    attached,
    callbacks_from_args,
    released,
)
from trainer_plugins.record.timeline import Beginning, timeline_of_run
from trainer_plugins.streaming.stream import stream_of
from trainer_plugins.units import MIB


@pytest.mark.parametrize("preset", ["observe", "memory_safe", "survive"])
@pytest.mark.all(but=1)
def test_attached_to_somebodys_script(simgpu, tmp_path, preset) -> None:
    expected = learn(trainer(tmp_path / "alone"))
    gc.collect()

    with attached(preset, stream_base="always", resident_layers=1):
        trained = trainer(tmp_path)
    layers = stream(trained)
    trained.train()

    assert are_equal(learned(trained), expected)
    # No callback of a preset reads a weight that is away. SurviveOOM computes the longest rows once more.
    in_a_step = 2 * (6 - 1)
    assert layers.num_fetched <= 5 * in_a_step + 1 + (preset == "survive") * in_a_step


def test_what_does_not_fit_by_an_option(simgpu, tmp_path) -> None:
    simgpu.set_capacity(20 * MIB)
    with attached("survive", stream_base="needed"):
        trained = trainer(tmp_path, model=adapted(base(**LARGE)))
    assert stream(trained).num_layers == 12
    trained.train()
    assert trained.state.global_step == 5
    assert trained.model.cpu().merge_and_unload().dtype == torch.float32
    assert stream_of(trained.model) is None
    with pytest.raises(torch.OutOfMemoryError):
        trained.model.to("simgpu")


def test_what_fits_is_left_alone(simgpu, tmp_path) -> None:
    with attached("memory_safe", stream_base="needed"):
        trained = trainer(tmp_path)
    assert stream_of(trained.model) is None


def test_the_users_own_callback_is_kept(simgpu, tmp_path) -> None:
    with attached("observe", stream_base="always", resident_layers=2):
        trained = trainer(tmp_path, StreamBase(resident_layers=3))
    assert stream(trained).resident_layers == 3
    assert sum(isinstance(one, StreamBase) for one in trained.callback_handler.callbacks) == 1


def test_options_that_are_wrong_are_refused_before_anything() -> None:
    with pytest.raises(ValueError, match="no, needed or always"):
        MemoryArguments(memory_stream_base="yes")
    with pytest.raises(ValueError, match="1 or more, got 0"):
        MemoryArguments(memory_resident_layers=0)
    names = [type(one).__name__ for one in callbacks_from_args(MemoryArguments())]
    assert "StreamBase" not in names


def test_what_is_released_between_runs(simgpu, tmp_path) -> None:
    with attached("observe", stream_base="always"):
        trained = trainer(tmp_path)
    trained.train()
    resident_bytes = stream(trained).resident_bytes
    before_bytes = torch.accelerator.memory_allocated()

    given_back = released(trained)

    assert given_back.freed_bytes >= resident_bytes
    assert torch.accelerator.memory_allocated() <= before_bytes - resident_bytes
    assert trained.evaluate()["eval_loss"] > 0


def test_what_runs_says_where_the_base_is(simgpu, tmp_path) -> None:
    trained = trainer(tmp_path, StreamBase(), StrategyInForce(), max_steps=1)
    trained.train()

    (began,) = [one for one in timeline_of_run(str(tmp_path), 0) if isinstance(one, Beginning)]
    runs = began.strategy
    streamed_bytes = stream(trained).num_bytes
    assert runs.homes["cpu"] == streamed_bytes // 4
    assert runs.homes["simgpu"] == runs.num_params - streamed_bytes // 4
    assert runs.offload == {"streamed base": "cpu"}
    assert "streamed base on cpu" in str(runs)
