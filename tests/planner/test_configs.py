"""A config.json as somebody has it: planned as `AutoConfig.from_pretrained` reads it, or refused by name."""

import json
from dataclasses import replace
from typing import Any

import pytest
from click.testing import CliRunner

from tests.models import IS_OLD
from tests.planner.test_plans import Plans, request, tiny
from trainer_plugins import MemoryPlan
from trainer_plugins.cli import app
from trainer_plugins.planner.inputs import arguments_to_send
from trainer_plugins.planner.plan import NotPredicted, PlanError

LENGTH, VOCABULARY = 64, 1024
SMALL = {"vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 2, "pad_token_id": 0}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128}
INFINITE = {"time_step_limit": [0.0, {"__float__": "Infinity"}]}
TOKENS = {"bos_token_id": 1, "eos_token_id": 2}
MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_ssm": 128,
    "mamba_d_state": 16,
    "mamba_chunk_size": 16,
}
T5 = {
    "vocab_size": VOCABULARY,
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 128,
    "num_layers": 2,
    "num_heads": 4,
}
TRAINED = {
    "apertus": {"model_type": "apertus", **SMALL, **HEADS, **TOKENS},
    "mamba2": {
        "model_type": "mamba2",
        **SMALL,
        **INFINITE,
        "num_heads": 8,
        "head_dim": 16,
        "state_size": 16,
        "n_groups": 1,
        "chunk_size": 16,
    },
    "falcon_h1": {"model_type": "falcon_h1", **SMALL, **HEADS, **MAMBA, **INFINITE},
    "t5": {"model_type": "t5", **T5, "decoder_start_token_id": None},
}


def planned(config, *flags, **how):
    how = {"sequence_length": LENGTH, "dtype": "float32", **how}
    return replace(request(config, *flags, rows=4, **how), card=None)


BUILT = "transformers cannot build the model of this config: "
STRICT = f"{BUILT}StrictDataclassFieldValidationError: Validation error for field"
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"architectures": ["os.system"]}, 'architectures is ["os.system"]: transformers'),
    ({"architectures": ["AutoConfig"]}, "has no such model"),
    ({"architectures": ["BertForMaskedLM"]}, "a class of the model_type 'bert'"),
    ({"architectures": "LlamaForCausalLM"}, "architectures"),
    ({"model_type": ["llama"]}, f"{BUILT}TypeError"),
    *(() if IS_OLD else [({"attn_implementation": ["a"]}, BUILT)]),  # 4 reads no such key
    ({"num_hidden_layers": "two"}, BUILT if IS_OLD else f"{STRICT} 'num_hidden_layers': TypeError"),
    ({"hidden_size": None}, BUILT if IS_OLD else f"{STRICT} 'hidden_size': TypeError"),
    ({"num_attention_heads": 0}, f"{BUILT}ZeroDivisionError"),
    ({"hidden_act": "nope"}, "nope"),
    ({"rope_parameters": {"rope_type": 5}}, BUILT),
    ({"quantization_config": {"load_in_4bit": "yes"}}, "load_in_4bit must be a boolean"),
    ({"num_labels": "x"}, BUILT),
    ({"dtype": ["bfloat16"]}, BUILT),
    ({"vocab_size": 4, "eos_token_id": [1, 2], "pad_token_id": 9}, "Padding_idx must be within"),
]
WRONG_ARGUMENTS = [
    ({"per_device_train_batch_size": "2"}, "TypeError: "),
    ({"learning_rate": [1]}, "not supported between"),
    ({"optim": 5}, "5 is not a valid OptimizerNames"),
    ({"batch_size": 5}, "got an unexpected keyword argument 'batch_size'"),
    ("--accelerator_config", "[1]"),
]
ADAPTER = {"peft_type": "LORA", "r": "8", "target_modules": "all-linear"}
AUDIO = {"encoder_layers": 1, "d_model": 64, "encoder_ffn_dim": 64, "encoder_attention_heads": 4}
HEARING = {"model_type": "qwen2_audio", "text_config": {"model_type": "qwen2", **SMALL, **HEADS}}


def with_arguments(given):
    if isinstance(given, str):
        return planned(tiny(), given, "[1]")
    sent = arguments_to_send({"output_dir": "runs", **given})
    asked = planned(tiny())
    return replace(asked, source=replace(asked.source, arguments=sent))


REQUESTS = {
    **{name: planned(config) for name, config in TRAINED.items()},
    **{str(given): planned(tiny() | given, dtype=None) for given, _ in WRONG},
    **{str(given): with_arguments(given) for given, _ in WRONG_ARGUMENTS},
    "adapter": planned(tiny(), peft=ADAPTER),
    "hearing": planned(
        {**HEARING, "architectures": ["Qwen2AudioForConditionalGeneration"], "audio_config": AUDIO},
        sequence_length=2048,
    ),
}


@pytest.fixture(scope="module")
def outcomes() -> Plans:
    return Plans(REQUESTS)


@pytest.mark.all(unless=lambda name: name == "t5")
@pytest.mark.skipif(IS_OLD, reason="transformers 4 reads no infinite number, and has no xIELU")
@pytest.mark.parametrize("name", TRAINED)
def test_a_config_is_read_as_the_run_does(outcomes, name):
    plan = outcomes[name]
    assert isinstance(plan, MemoryPlan), plan
    assert plan.moments["backward"].allocated_bytes > 4 * plan.num_parameters
    said = [line for line in plan.assumptions if "decoder_start_token_id" in line]
    assert len(said) == (name == "t5")


@pytest.mark.parametrize(
    ("name", "line"),
    [
        *((str(given), line) for given, line in (*WRONG, *WRONG_ARGUMENTS)),
        ("adapter", "the dry run failed: TypeError: "),
    ],
)
@pytest.mark.all(but=8)
def test_a_wrong_value_is_said_as_the_library_says_it(outcomes, name, line):
    assert isinstance(outcomes[name], PlanError), outcomes[name]
    assert line in str(outcomes[name])


def test_a_row_of_text_is_not_measured_against_the_positions_of_sounds(outcomes):
    assert isinstance(outcomes["hearing"], NotPredicted), outcomes["hearing"]
    assert "from its config alone: pass your Trainer to plan_run" in str(outcomes["hearing"])


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({"num_hidden_layers": 1_000_000}, "num_hidden_layers is 1,000,000"),
        ({"text_config": {"n_layer": 1e9}}, "text_config.n_layer is 1,000,000,000.0"),
        ({"num_hidden_layers": -1}, "num_hidden_layers is -1"),
    ],
)
def test_so_many_layers_are_a_mistake(tmp_path, config, key):
    (tmp_path / "config.json").write_text(json.dumps(tiny(**config)))
    done = CliRunner().invoke(app, ["plan", "--model", str(tmp_path)])
    assert done.exit_code == 2
    assert f"the config's {key}: a number from 1 to 4,096 is expected" in done.stderr
