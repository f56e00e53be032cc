"""An evaluation as a plan from a config tells it: what metrics keep, and how they would fit.

In transformers#13597 a T5 trained in half of its card and died in the evaluation: its
`compute_metrics` kept the logits of all batches.
"""

from dataclasses import replace

import pytest

from trainer_plugins.planner.inputs import ConfigInputs, RunInputs, request_of
from trainer_plugins.planner.plan import MemoryPlan
from trainer_plugins.planner.predict import predict_all
from trainer_plugins.report.plan_text import details, verdict
from trainer_plugins.units import GIB, MIB

pytestmark = pytest.mark.all

VOCABULARY, WIDTH = 32128, 64
T5 = {
    "model_type": "t5",
    "architectures": ["T5ForConditionalGeneration"],
    "d_model": WIDTH,
    "d_kv": 16,
    "d_ff": 128,
    "num_layers": 2,
    "num_heads": 4,
    "vocab_size": VOCABULARY,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
}
FLAGS = (
    *("--output_dir", "runs", "--eval_strategy", "epoch", "--per_device_train_batch_size", "2"),
    *("--per_device_eval_batch_size", "4"),
)
NUM_BATCHES, ROWS, LENGTH, TARGET = 40, 4, 32, 64
LOGITS_BYTES = ROWS * TARGET * VOCABULARY * 4
ENCODER_BYTES = ROWS * LENGTH * WIDTH * 4
"""The last hidden state of the encoder, which T5 returns too."""


def request(metrics: bool, *more: str, gpu: str | None = "1GiB,sm_90"):
    data = ((*FLAGS, *more), LENGTH, TARGET, None, None, None, NUM_BATCHES, metrics)
    return request_of(T5, ConfigInputs(*data), RunInputs(gpu, calibration=False))


@pytest.fixture(scope="module")
def plans() -> dict[str, MemoryPlan]:
    requests = {
        "losses": request(False),
        "metrics": replace(request(True), proposes=True),
        "no card": request(True, gpu=None),
        "4 GiB": request(True, gpu="4GiB,sm_90"),
    }
    answers = zip(requests, predict_all(list(requests.values())), strict=True)
    found = {name: plan for name, plan in answers if isinstance(plan, MemoryPlan)}
    assert found.keys() == requests.keys()
    return found


def test_without_metrics_it_fits_and_the_other_figure_is_said(plans):
    plan = plans["losses"]
    assert plan.fits
    assert plan.moments["evaluation"].allocated_bytes < plan.moments["backward"].allocated_bytes * 3
    (said,) = [line for line in plan.assumptions if "compute_metrics" in line]
    assert "--metrics" in said
    assert f"{NUM_BATCHES * (LOGITS_BYTES + ENCODER_BYTES) / GIB:.2f} GiB" in said


def test_with_metrics_the_logits_of_all_batches_are_kept_twice_and_it_does_not_fit(plans):
    plan, losses = plans["metrics"], plans["losses"]
    assert plan.fits is False
    assert plan.moment == "evaluation"
    kept = (2 * NUM_BATCHES - 1) * LOGITS_BYTES
    more = plan.allocated_peak_bytes - losses.moments["evaluation"].allocated_bytes
    assert more == pytest.approx(kept, rel=0.02)
    assert plan.host_ram_bytes_per_node == pytest.approx(NUM_BATCHES * LOGITS_BYTES, rel=0.1)
    assert not any("compute_metrics" in line for line in plan.assumptions)


def test_without_a_card_a_run_needs_its_tensors_and_a_card_that_holds_them_shows_that_it_does(
    plans,
):
    """Blocks that no later batch can use are given back by a full card, and by no other."""
    needs, plan = plans["no card"], plans["4 GiB"]
    assert needs.allocated_peak_bytes == plan.allocated_peak_bytes
    said = f"{needs.allocated_peak_bytes / GIB:.2f} GiB"
    assert verdict(needs) == f"Needs {said}, in the evaluation"
    assert details(needs)[0].startswith(f"{said} of tensors at the peak of each GPU")
    assert plan.fits
    assert plan.num_flushes
    assert needs.reserved_peak_bytes > 3 * plan.reserved_peak_bytes


def test_the_answer_sends_outputs_to_main_memory_and_as_answered_it_fits(plans):
    instead, best = plans["metrics"].proposals[:2]
    assert instead.changes == ("predictions instead of logits",)
    assert "preprocess_logits_for_metrics=" in instead.flags
    # a number of 8 bytes for each token instead of each word
    assert instead.host_ram_bytes_per_node < best.host_ram_bytes_per_node / 20
    name, steps = best.flags.split()
    assert name == "--eval_accumulation_steps"
    assert 1 < int(steps) < NUM_BATCHES
    assert (best.micro_batch, best.accumulation_steps) == (2, 1), "the training is as it was"
    # joined in main memory: the old array and the new one
    assert best.host_ram_bytes_per_node > 1.5 * NUM_BATCHES * LOGITS_BYTES
    (plan,) = predict_all([request(True, *best.flags.split())])
    assert isinstance(plan, MemoryPlan)
    assert plan.fits
    assert plan.reserved_peak_bytes == pytest.approx(best.reserved_peak_bytes, abs=4 * MIB)
