"""The preset `survive`, the callback SurviveOOM and survive_oom by hand: one and the same, and never twice."""

import pytest

from tests.survival.failing import Run, gradients_off_by, small_trainer
from tests.survival.test_attach import remarks
from trainer_plugins import SurviveOOM, attached, protect, survive_oom


def by_preset(trainer):
    protect(trainer, preset="survive")


def by_callback(trainer):
    trainer.add_callback(SurviveOOM())


def both(trainer):
    survive_oom(trainer)
    protect(trainer, preset="survive")


@pytest.mark.parametrize("attach", [by_preset, by_callback, both])
def test_a_run_survives_by_each_of_its_doors(tmp_path, attach) -> None:
    whole = Run(small_trainer(tmp_path))
    trainer = small_trainer(tmp_path)
    attach(trainer)
    survived = Run(trainer, {1: [100], 3: [200]})

    assert survived.allocations.num_failed == 2
    assert gradients_off_by(survived, whole) <= 1e-12
    assert len(remarks(tmp_path, "out-of-memory-survived")) == 2
    assert not remarks(tmp_path, "out-of-memory-refused")


def test_every_trainer_of_a_process(tmp_path) -> None:
    with attached(preset="survive"):
        trainer = small_trainer(tmp_path)
    Run(trainer, {0: [100]})
    trainer.train()  # again: it is attached already

    assert len(remarks(tmp_path, "out-of-memory-survived")) == 1


def test_what_cannot_be_helped_is_said_and_trains_on_unless_asked_otherwise(tmp_path) -> None:
    trainer = small_trainer(
        tmp_path, compute_loss_func=lambda outputs, labels, **kwargs: outputs.logits.sum() * 0
    )
    protect(trainer, preset="survive")
    trainer.train()
    assert trainer.state.global_step == 2
    (told,) = remarks(tmp_path, "out-of-memory-refused")
    assert "compute_loss_func is a custom loss" in told.finding.evidence

    strict = small_trainer(
        tmp_path, compute_loss_func=lambda outputs, labels, **kwargs: outputs.logits.sum() * 0
    )
    protect(strict, preset="survive", on_refusal="error")
    with pytest.raises(ValueError, match="compute_loss_func is a custom loss"):
        strict.train()
    assert strict.state.global_step == 0
