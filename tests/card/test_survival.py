"""Micro-batches that do not fit on a real card are divided, and the run ends as it would have."""

import gc
from typing import Any

import pytest
import torch

from tests import rounding
from tests.card.shared import CARD, ON_A_CARD, card_of, findings, token_rows, wide_llama
from trainer_plugins import SurviveOOM, survive_oom
from trainer_plugins.units import MIB

# Survival measures that pieces add up to the whole: gradients of zeros would be refused.
pytestmark = [*ON_A_CARD, pytest.mark.numbers]

ROWS, LENGTH, STEPS = 64, 128, 3
PIECE = 8


def run(make_trainer, num_rows: int, *callbacks: Any, **kwargs: Any) -> Any:
    """Three steps of 64 rows; the logits of each row take 2 MiB."""
    dropout = kwargs.pop("dropout", 0.0)
    model = wide_llama(attn_implementation="eager", attention_dropout=dropout)
    trainer = make_trainer(
        *callbacks, model=model, max_steps=STEPS, per_device_train_batch_size=num_rows,
        gradient_accumulation_steps=ROWS // num_rows, learning_rate=1e-3, logging_strategy="steps",
        logging_steps=1, seed=3, **kwargs,
    )  # fmt: skip
    trainer.train_dataset = token_rows(ROWS * STEPS, LENGTH)
    assert str(trainer.args.device) == CARD
    return trainer


def weights(trainer: Any) -> list[torch.Tensor]:
    return [each.detach().cpu() for each in trainer.model.parameters()]


def losses(trainer: Any) -> list[float]:
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def by_itself(
    make_trainer, num_rows: int, **kwargs: Any
) -> tuple[list[torch.Tensor], list[float], int]:
    """The run with micro-batches that fit: its weights and losses, and what it reserved."""
    torch.cuda.reset_peak_memory_stats()
    trainer = run(make_trainer, num_rows, **kwargs)
    trainer.train()
    found = weights(trainer), losses(trainer), torch.cuda.max_memory_reserved()
    del trainer
    gc.collect()
    torch.cuda.empty_cache()
    return found


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_divided_run_has_the_weights_of_the_one_that_fits(
    make_trainer, deterministic, dropout: float
) -> None:
    """Bit for bit: failed attempts of the forward pass leave random numbers where they were."""
    fitting_weights, fitting_losses, reserved = by_itself(make_trainer, PIECE, dropout=dropout)
    held = torch.cuda.memory_reserved()
    # Twice the piece does not get through the forward pass: that takes more than half of the whole.
    with card_of(held + int(1.1 * (reserved - held))):
        trainer = run(make_trainer, ROWS, dropout=dropout)
        survive_oom(trainer, plan_first=False)
        trainer.train()
    assert trainer.state.global_step == STEPS
    assert trainer.state.epoch == 1.0
    told = [each for each in findings(trainer) if each.code.startswith("out-of-memory")]
    assert [each.code for each in told] == ["out-of-memory-survived"]
    assert told[0].summary.startswith(
        f"{ROWS} rows ({ROWS * LENGTH} tokens, including padding) did not"
    )
    assert f"in {ROWS // PIECE} pieces of at most {PIECE} rows" in told[0].summary
    assert losses(trainer) == pytest.approx(fitting_losses, rel=2e-5)
    assert all(map(torch.equal, weights(trainer), fitting_weights))


def assert_equal_but_for_rounding(
    trainer: Any, theirs: list[torch.Tensor], their_losses: list[float]
) -> None:
    terms = rounding.terms_of(num_layers=2, width=64)
    assert losses(trainer) == pytest.approx(their_losses, rel=rounding.of_sums(terms))
    rates = [line["learning_rate"] for line in trainer.state.log_history if "loss" in line]
    assert len(rates) == STEPS
    ours = torch.cat([each.flatten() for each in weights(trainer)])
    other = torch.cat([each.flatten() for each in theirs])
    assert rounding.after_adam(ours, other, rates, terms) <= 1


def test_an_error_in_the_thread_of_the_backward_pass_is_survived(make_trainer) -> None:
    """The gradient of the logits is what does not fit: the forward pass has them and their logarithms."""
    whole_weights, whole_losses, reserved = by_itself(make_trainer, ROWS)
    held = torch.cuda.memory_reserved()
    with card_of(held + int(0.88 * (reserved - held))):
        trainer = run(make_trainer, ROWS)
        survive_oom(trainer, plan_first=False)
        trainer.train()
    assert trainer.state.global_step == STEPS
    told = [each for each in findings(trainer) if each.code.startswith("out-of-memory")]
    assert [each.code for each in told] == ["out-of-memory-survived"]
    assert "ran out of memory in the backward pass" in told[0].summary
    assert_equal_but_for_rounding(trainer, whole_weights, whole_losses)


def test_a_planned_run_fails_nowhere_and_has_the_undivided_weights(make_trainer) -> None:
    whole_weights, whole_losses, _ = by_itself(make_trainer, ROWS)
    _, _, reserved = by_itself(make_trainer, PIECE)
    held = torch.cuda.memory_reserved()
    with card_of(held + int(1.3 * (reserved - held)) + 16 * MIB):
        trainer = run(make_trainer, ROWS, SurviveOOM())
        trainer.train()
    assert trainer.state.global_step == STEPS
    codes = {each.code for each in findings(trainer)}
    assert "out-of-memory-foreseen" in codes
    assert "out-of-memory-survived" not in codes
    assert_equal_but_for_rounding(trainer, whole_weights, whole_losses)


def test_a_card_on_which_one_row_does_not_fit_ends_with_what_was_tried(make_trainer) -> None:
    held = torch.cuda.memory_reserved()
    trainer = run(make_trainer, ROWS)
    survive_oom(trainer, plan_first=False)
    with card_of(held + 6 * MIB), pytest.raises(torch.OutOfMemoryError) as raised:
        trainer.train()
    assert "CUDA out of memory. Tried to allocate" in str(raised.value)
    assert "nothing smaller to try than 1 row" in str(raised.value)
    assert torch.cuda.get_per_process_memory_fraction() == 1.0
