"""TRL's Trainers that generate what they train on: predicted, then really run on the simulated card."""

import pytest

from tests.planner.loop import Loop
from tests.planner.test_closed_loop import llama
from tests.planner.test_closed_loop_trl import HAS_HEAD, LORA, SETTINGS, tokenizer, words

trl = pytest.importorskip("trl")
from datasets import Dataset  # noqa: E402
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer  # noqa: E402

NEVER_ENDS = {"suppress_tokens": [0, 1]}
REFERENCE = {"beta": 0.04}


def as_long_as_it_is(completions, **_):
    return [float(len(each)) for each in completions]


def online(path, trainer=GRPOTrainer, config=GRPOConfig, peft_config=None, **settings):
    """Each batch has a long and a short prompt, so that there is padding."""
    model = llama()
    if "beta" in settings and peft_config is None:  # the reference is read from disk
        model.save_pretrained(path / "base")
        model.config._name_or_path = str(path / "base")
    given = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "num_generations": 4,
        "max_completion_length": 24,
        "generation_kwargs": NEVER_ENDS,
        "shuffle_dataset": False,
    }
    prompts = [{"prompt": words(length)} for length in [40, 30] * 8]
    return trainer(
        model,
        as_long_as_it_is,
        args=config(str(path), **{**SETTINGS, **given, **settings}),
        train_dataset=Dataset.from_list(prompts),
        processing_class=tokenizer(),
        peft_config=peft_config,
    )


RUNS = {
    "grpo, with a reference": lambda path: online(path, **REFERENCE),
    "grpo, lora, rows used twice": lambda path: online(
        path, peft_config=LORA, num_iterations=2, **REFERENCE
    ),
    "rloo": lambda path: online(path, RLOOTrainer, RLOOConfig, **REFERENCE),
}


@pytest.fixture(scope="module")
def loop() -> Loop:
    return Loop(RUNS)


@pytest.mark.all
@pytest.mark.parametrize("name", RUNS)
def test_the_card_holds_what_was_predicted(simgpu, loop, tmp_path, name):
    if not HAS_HEAD:
        loop.refuses(name, tmp_path, "of a TRL without its own head")
        return
    plan = loop.goes_round(name, tmp_path)
    assert plan.moments["generation"].allocated_bytes > plan.moments["load"].allocated_bytes
    assert any("max_completion_length" in line for line in plan.assumptions)
