"""A config.json as somebody has it: planned as `AutoConfig.from_pretrained` reads it, or refused by name."""

import json
from dataclasses import replace
from functools import cache

import pytest
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM
from typer.testing import CliRunner

from tests.planner.loop import Loop
from tests.planner.test_closed_loop import VOCABULARY, rows, run
from tests.planner.test_plans import request, tiny
from tests.processes import ENDS_A_HANG
from trainer_plugins.cli import app
from trainer_plugins.planner import MemoryPlan, NotPredicted, PlanError
from trainer_plugins.planner.run import predict_all

IS_OLD = int(transformers.__version__.partition(".")[0]) < 5
LENGTH = 64
SMALL = {"vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 2, "pad_token_id": 0}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128}
INFINITE = {"time_step_limit": [0.0, {"__float__": "Infinity"}]}
TOKENS = {"bos_token_id": 1, "eos_token_id": 2}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_ssm": 128, "mamba_d_state": 16, "mamba_chunk_size": 16}
T5 = {"vocab_size": VOCABULARY, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
TRAINED = {
    "apertus": {"model_type": "apertus", **SMALL, **HEADS, **TOKENS},
    "mamba2": {
        "model_type": "mamba2",
        **SMALL,
        **INFINITE,
        **{"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1, "chunk_size": 16},
    },
    "falcon_h1": {"model_type": "falcon_h1", **SMALL, **HEADS, **MAMBA, **INFINITE},
    "t5": {"model_type": "t5", **T5, "decoder_start_token_id": None},
}


def planned(config, *flags, **how):
    how = {"sequence_length": LENGTH, "dtype": "float32", **how}
    return replace(request(config, *flags, rows=4, **how), device="simgpu", card=None)


def trains(path, name):
    """Train the model of a config.json as a script would that loads it."""
    (path / "config.json").write_text(json.dumps(TRAINED[name]))
    config = AutoConfig.from_pretrained(path)
    auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    if config.is_encoder_decoder:
        config.decoder_start_token_id = 0
    data = [{**row, "attention_mask": row["labels"] * 0 + 1} for row in rows(length=LENGTH)]
    return run(path, auto.from_config(config), data=data, per_device_train_batch_size=4)


LOOP = Loop({name: lambda path, name=name: trains(path, name) for name in TRAINED})
PLANNED = {name: planned(config) for name, config in TRAINED.items()}


@pytest.mark.skipif(IS_OLD, reason="transformers 4 reads no infinite number, and has no xIELU")
@pytest.mark.parametrize("name", TRAINED)
def test_a_config_is_read_and_trained_as_the_run_does(simgpu, tmp_path, name):
    if not LOOP.outcomes:
        found = predict_all([*PLANNED.values()], ENDS_A_HANG)
        LOOP.outcomes.update(zip(PLANNED, found, strict=True))
    plan = LOOP.goes_round(name, tmp_path)
    said = [line for line in plan.assumptions if "decoder_start_token_id" in line]
    assert len(said) == (name == "t5")
