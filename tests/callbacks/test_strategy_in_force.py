"""StrategyInForce in one process: what it writes, that it changes nothing, and what it says of the allocator."""

import logging

import pytest
import torch
from rich.console import Console

from tests.written import read_entries
from trainer_plugins import StrategyInForce
from trainer_plugins.record.timeline import Beginning, Remark, timeline_of_run
from trainer_plugins.report.text import memory_report


def test_as_what_a_training_runs_is_in_its_timeline(anywhere, make_trainer) -> None:
    trainer = make_trainer(StrategyInForce(), max_steps=1, gradient_checkpointing=True)
    trainer.train()

    (began,) = read_entries(trainer.args.output_dir, Beginning)
    runs = began.strategy
    assert (runs.wrapped_class, runs.family, runs.world_size, runs.device) == (
        "LlamaForCausalLM",
        "nothing",
        1,
        anywhere,
    )
    assert runs.homes == {anywhere: sum(p.numel() for p in trainer.model.parameters())}
    assert (runs.num_partitioned, runs.zero_stage, runs.offload) == (0, None, {})
    assert (runs.optimizer_class, runs.master_dtype) == ("AdamW", "float32")
    assert runs.is_checkpointing


def test_it_speaks_once_a_training_and_the_report_shows_it(make_trainer) -> None:
    first, second = StrategyInForce(), StrategyInForce()
    trainer = make_trainer(first, second, max_steps=1, model=None)
    trainer.train()

    timeline = list(timeline_of_run(trainer.args.output_dir, 0))
    assert sum(isinstance(entry, Beginning) for entry in timeline) == 1
    console = Console(record=True, width=200)
    console.print(memory_report({0: timeline}))
    assert console.export_text().count("from step 0: 1 rank of LlamaForCausalLM") == 1


@pytest.mark.skipif(
    not hasattr(torch._C, "_accelerator_getAllocatorSettings"),
    reason="torch 2.12 tells its settings",
)
def test_allocator_settings_that_came_too_late_are_said(
    anywhere, make_trainer, monkeypatch, caplog
) -> None:
    # torch has read its variables by now, as it has in any training
    torch._C._accelerator_getAllocatorSettings()
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "garbage_collection_threshold:0.7")
    trainer = make_trainer(StrategyInForce(), max_steps=1)
    with caplog.at_level(logging.WARNING, logger="trainer_plugins"):
        trainer.train()

    codes = [
        e.finding.code for e in timeline_of_run(trainer.args.output_dir, 0) if isinstance(e, Remark)
    ]
    assert codes == ["allocator-settings-not-in-force"]
    assert "before the process starts" in caplog.text


class Unreadable(torch.nn.Module):
    @property
    def gradient_checkpointing(self):
        raise RuntimeError("not now")


def test_a_failure_of_the_look_is_said_and_training_goes_on(make_trainer, caplog) -> None:
    trainer = make_trainer(StrategyInForce(), max_steps=1)
    trainer.model.unreadable = Unreadable()
    trainer.train()

    assert trainer.state.global_step == 1
    assert "StrategyInForce failed; training continues" in caplog.text
