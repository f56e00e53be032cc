"""TRL's ORPO, CPO, TPO and GMPO: predicted, then really run on the simulated card."""

import pytest

from tests.planner.loop import Loop
from tests.planner.test_closed_loop import llama, t5
from tests.planner.test_closed_loop_online import online
from tests.planner.test_closed_loop_trl import LORA, SETTINGS, tokenizer, words

pytest.importorskip("trl")
pytest.importorskip("trl.experimental.tpo")
pytest.importorskip("trl.experimental.gmpo")
from datasets import Dataset
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.gmpo import GMPOConfig, GMPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer
from trl.experimental.tpo import TPOConfig, TPOTrainer

EVALUATES = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 6}


def compared(num_long_prompts: int) -> Dataset:
    """The rows with the longest prompts come first, and are shorter than the others.

    Without them, no mask of a batch has a 0 before it is joined with that of the other answers.
    """
    rows = [(75, 20, 20)] * num_long_prompts + [(40, 80, 50)] * 16
    return Dataset.from_list(
        [
            {
                "prompt": words(prompt),
                "chosen": f" {words(chosen)}",
                "rejected": f" {words(rejected)}",
                "reference": f" {words(chosen)}",
            }
            for prompt, chosen, rejected in rows
        ]
    )


def preferring(path, trainer, config, model=None, peft_config=None, num_long=4, **settings):
    args = config(str(path), per_device_train_batch_size=4, **{**SETTINGS, **settings})
    return trainer(
        model=model or llama(),
        args=args,
        train_dataset=compared(num_long),
        eval_dataset=compared(num_long) if "eval_strategy" in settings else None,
        processing_class=tokenizer(),
        peft_config=peft_config,
    )


RUNS = {
    "orpo": lambda path: preferring(path, ORPOTrainer, ORPOConfig),
    "orpo, autocast, checkpointing": lambda path: preferring(
        path, ORPOTrainer, ORPOConfig, bf16=True, gradient_checkpointing=True
    ),
    "orpo, evaluates": lambda path: preferring(path, ORPOTrainer, ORPOConfig, **EVALUATES),
    "orpo, t5": lambda path: preferring(
        path, ORPOTrainer, ORPOConfig, t5(), num_long=0, max_completion_length=60
    ),
    "cpo": lambda path: preferring(path, CPOTrainer, CPOConfig, peft_config=LORA),
    "cpo, simpo": lambda path: preferring(
        path, CPOTrainer, CPOConfig, num_long=0, loss_type="simpo", cpo_alpha=0.0, bf16=True
    ),
    "tpo": lambda path: preferring(path, TPOTrainer, TPOConfig),
    "tpo, autocast, checkpointing": lambda path: preferring(
        path, TPOTrainer, TPOConfig, bf16=True, gradient_checkpointing=True
    ),
    "gmpo": lambda path: online(path, GMPOTrainer, GMPOConfig, beta=0.04),
}


@pytest.fixture(scope="module")
def loop() -> Loop:
    return Loop(RUNS)


@pytest.mark.all(unless=lambda name: name == "orpo")
@pytest.mark.parametrize("name", RUNS)
def test_the_card_holds_what_was_predicted(simgpu, loop, tmp_path, name):
    plan = loop.goes_round(name, tmp_path)
    is_worst_case = any("x[mask]" in line for line in plan.assumptions)
    assert is_worst_case == name.startswith(("tpo", "gmpo"))
