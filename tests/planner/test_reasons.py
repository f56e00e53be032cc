"""A plan that cannot be made says why, and one that can says what it took for granted; each when it is asked for."""

import pytest
import transformers
from transformers import Trainer

from tests.models import IS_OLD
from tests.planner.test_plans import LORA, REENTRANT, Plans, request, tiny
from trainer_plugins import MemoryPlan, plan_run
from trainer_plugins.planner.plan import NotPredicted, PlanError

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SEPARATORS = {"cls_token_id": 1, "sep_token_id": 2}
MODERN = {"model_type": "modernbert", "architectures": ["ModernBertForMaskedLM"]}
REQUESTS = {
    "modernbert": request(
        {**MODERN, "vocab_size": 512, **TOKENS, **SEPARATORS, **SMALL},
        sequence_length=32,
        dtype="float32",
    ),
    "vit": request({"model_type": "vit", "architectures": ["ViTForImageClassification"], **SMALL}),
    "wav2vec2": request({"model_type": "wav2vec2", "architectures": ["Wav2Vec2ForCTC"], **SMALL}),
    "tf32": request(tiny(), "--tf32", "True", sequence_length=32),
    "labels": request(tiny(), num_labels=7, sequence_length=32),
    "lora": request(
        tiny(),
        "--gradient_checkpointing",
        "True",
        *REENTRANT,
        peft={**LORA, "r": 4},
        sequence_length=32,
    ),
    "tf32, t4": request(
        tiny(), "--tf32", "True", gpu="t4", sequence_length=32
    ),  # another card, so another server
}


@pytest.fixture(scope="module")
def outcomes() -> Plans:
    return Plans(REQUESTS)


@pytest.mark.skipif(IS_OLD, reason="transformers 4 compiles ModernBERT with Triton")
def test_values_drawn_until_all_are_in_bounds_come_to_an_end(outcomes):
    """`torch.nn.init.trunc_normal_` draws again as long as any value lies outside."""
    plan = outcomes["modernbert"]
    assert isinstance(plan, MemoryPlan), plan
    assert plan.num_parameters > 512 * 64


def test_inputs_that_are_no_tokens_have_the_size_that_the_config_says(outcomes):
    plan = outcomes["vit"]
    assert isinstance(plan, MemoryPlan), plan
    assert "a picture has 3 x 224 x 224 numbers (image_size of the config)" in plan.assumptions
    assert "length" not in plan.planned


def test_what_takes_sound_of_any_length_needs_a_trainer(outcomes):
    line = "Wav2Vec2ForCTC from its config alone, which does not give the size of input_values: "
    assert isinstance(outcomes["wav2vec2"], NotPredicted), outcomes["wav2vec2"]
    assert line in str(outcomes["wav2vec2"])
    assert "pass your Trainer to plan_run" in str(outcomes["wav2vec2"])


@pytest.mark.all
def test_tf32_is_there_as_on_the_card(outcomes):
    assert isinstance(outcomes["tf32"], MemoryPlan), outcomes["tf32"]
    assert "--tf32 requires Ampere" in str(outcomes["tf32, t4"])


def test_the_number_of_labels_makes_a_classifier(outcomes):
    plan = outcomes["labels"]
    assert isinstance(plan, MemoryPlan), plan
    assert plan.planned["model"] == "LlamaForSequenceClassification"


def test_lora_behind_reentrant_checkpointing_has_its_cause_and_its_cure(outcomes):
    """transformers 5 lets the input of the first layer require a gradient; 4.57 does not."""
    outcome = outcomes["lora"]
    if isinstance(outcome, MemoryPlan):
        assert not transformers.__version__.startswith("4.")
        return
    says_cause_and_cure(str(outcome))


def says_cause_and_cure(text: str) -> None:
    assert "Reentrant checkpointing" in text
    assert '"use_reentrant": false' in text
    assert "enable_input_require_grads" in text


class DetachesTheLoss(Trainer):
    """Ends as LoRA does behind reentrant checkpointing in transformers 4.57, in every version."""

    def compute_loss(self, *args, **kwargs):
        return super().compute_loss(*args, **kwargs).detach()


def test_a_loss_of_nothing_that_is_trained_has_its_cause_and_its_cure(make_trainer):
    with pytest.raises(PlanError, match="the loss depends on no trainable parameter") as refused:
        plan_run(make_trainer(trainer_class=DetachesTheLoss))
    says_cause_and_cure(str(refused.value))
