"""`rows_at_once` divides from the first step on: whatever the training, it stays that of the whole."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import SequentialSampler
from transformers import Trainer
from transformers.trainer_utils import get_last_checkpoint

from tests.survival.failing import (
    logged_by,
    numbers_off_by,
    off_by,
    padded,
    ragged_rows,
    small_trainer,
    weights_by_rounding,
)
from tests.survival.test_families import answers, classes, encoder_decoder, masked_words, packed
from tests.survival.test_vouched import by_rows
from trainer_plugins import SurviveOOM, survive_oom

BY_EPOCHS: dict[str, Any] = {"steps": -1, "num_train_epochs": 2, "gradient_accumulation_steps": 1}


class InMyOrder(Trainer):
    def _get_train_sampler(self, *_: object) -> SequentialSampler:
        return SequentialSampler(range(0, len(self.train_dataset), 3))


def evaluated(tmp_path):
    return small_trainer(
        tmp_path, eval_dataset=ragged_rows(24), eval_strategy="steps", eval_steps=1, save_steps=1,
        save_strategy="steps", load_best_model_at_end=True, per_device_eval_batch_size=16, steps=3,
    )  # fmt: skip


def grouped(tmp_path):
    rows = [{**row, "length": len(row["input_ids"])} for row in ragged_rows()]
    strategy: dict[str, Any] = {"train_sampling_strategy": "group_by_length"}
    if not hasattr(small_trainer(tmp_path).args, "train_sampling_strategy"):
        strategy = {"group_by_length": True}  # before transformers 5
    return small_trainer(tmp_path, train_dataset=rows, **strategy)


KINDS: dict[str, Callable[..., Trainer]] = {
    "short last batch": lambda path: small_trainer(
        path, train_dataset=ragged_rows(37), **BY_EPOCHS
    ),
    "last batch dropped": lambda path: small_trainer(
        path, train_dataset=ragged_rows(37), dataloader_drop_last=True, **BY_EPOCHS
    ),
    "evaluation": evaluated,
    "sampler": lambda path: small_trainer(path, trainer_class=InMyOrder),
    "grouped": grouped,
    "own loss": lambda path: small_trainer(path, compute_loss_func=by_rows),
    **{make.__name__: make for make in (masked_words, classes, encoder_decoder, answers, packed)},
}


def trained(trainer: Trainer, rows: int, **options: Any) -> Trainer:
    if rows:
        is_vouched = trainer.compute_loss_func is not None
        trainer.add_callback(SurviveOOM(rows_at_once=rows, vouch_for_loss=is_vouched))
    trainer.train(**options)
    return trainer


def weights(trainer: Trainer) -> list[torch.Tensor]:
    return [each.detach().clone() for each in trainer.model.parameters()]


@pytest.mark.all(unless=lambda kind: kind in ("last batch dropped", "evaluation"))
@pytest.mark.parametrize("kind", KINDS)
def test_a_training_is_the_same_with_fewer_rows_at_once(tmp_path, kind: str) -> None:
    whole = trained(KINDS[kind](tmp_path / "whole"), 0)
    divided = trained(KINDS[kind](tmp_path / "divided"), 3 if kind == "sampler" else 2)

    if kind == "packed":  # attention in float32
        assert weights_by_rounding(weights(divided), weights(whole), steps=2) <= 1
    else:
        assert off_by(weights(divided), weights(whole)) <= 1e-11
    assert divided.state.global_step == whole.state.global_step
    assert divided.state.best_global_step == whole.state.best_global_step
    assert numbers_off_by(logged_by(divided), logged_by(whole)) <= 1e-6
    said = [log.get("memory/divided_micro_batches", 0) for log in divided.state.log_history]
    # One of shorter rows may be as small as two of the longest.
    assert 0 < sum(said) <= whole.args.gradient_accumulation_steps * whole.state.global_step


@pytest.mark.all
def test_a_checkpoint_of_the_whole_is_resumed_with_fewer_rows_at_once(tmp_path) -> None:
    """It holds the limit of a run without one, and of one with a higher one."""
    kept = {"save_strategy": "steps", "save_steps": 1, "steps": 3}
    whole = trained(small_trainer(tmp_path / "whole", **kept), 0)
    for rows, before in ((2, 0), (1, 3)):
        folder = tmp_path / f"{rows}"
        trained(small_trainer(folder, **{**kept, "steps": 1}, lr_scheduler_type="linear"), before)
        first = get_last_checkpoint(str(folder))
        resumed = trained(small_trainer(folder, **kept), rows, resume_from_checkpoint=first)
        assert resumed.state.log_history[-2]["memory/divided_micro_batches"] == 2
        assert whole.state.global_step == resumed.state.global_step


def test_data_that_cannot_be_asked_counts_by_its_first_rows(tmp_path) -> None:
    class Streamed(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(ragged_rows())

    whole = trained(small_trainer(tmp_path / "whole", train_dataset=Streamed()), 0)
    divided = trained(small_trainer(tmp_path / "divided", train_dataset=Streamed()), 1)
    assert off_by(weights(divided), weights(whole)) <= 1e-11
    assert divided.state.log_history[0]["memory/divided_micro_batches"] == 2


def test_a_number_of_rows_below_zero_is_refused(tmp_path) -> None:
    with pytest.raises(ValueError, match="rows_at_once is 0"):
        survive_oom(small_trainer(tmp_path, data_collator=padded), rows_at_once=-1)
