"""What a load takes: experts that are stacked, mxfp4 that is decoded, and ranks that read the same file."""

import json
import sys
from pathlib import Path

import pytest
import torch
import transformers
from typer.testing import CliRunner

from tests import processes
from tests.distributed.launched import environment
from tests.planner.test_plans import CHECKPOINTING
from trainer_plugins.cli import app
from trainer_plugins.planner.rehearse import loading
from trainer_plugins.units import GIB, size

IS_TOO_OLD = transformers.__version__.startswith("4.")
if IS_TOO_OLD:
    pytest.skip("transformers 4 converts no checkpoint", allow_module_level=True)

LORA = ("--lora-r", "8", "--lora-target", "q_proj", "--bf16", "True")
ZERO_3 = str(
    Path(__file__).parents[2] / "trainer_plugins" / "configs" / "accelerate" / "zero3.yaml"
)
LAYERS, EXPERTS, WIDE, WORDS = 3, 16, 512, 1024
OF_A_LAYER = 3 * EXPERTS * WIDE * WIDE * 2  # bytes of its experts in bf16
MIXTURE = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    **dict.fromkeys(("hidden_size", "intermediate_size", "moe_intermediate_size"), WIDE),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 4),
    "head_dim": 128,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "num_hidden_layers": LAYERS,
    "vocab_size": WORDS,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
IN_MXFP4 = {
    **{name: MIXTURE[name] for name in ("head_dim", "num_experts_per_tok", "vocab_size")},
    **{name: MIXTURE[name] for name in ("hidden_size", "num_attention_heads", "dtype")},
    "model_type": "gpt_oss",
    "architectures": ["GptOssForCausalLM"],
    "intermediate_size": WIDE,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": 4,
    "num_local_experts": 4 * EXPERTS,
    "attn_implementation": "eager",
    "quantization_config": {"quant_method": "mxfp4"},
}


@pytest.fixture
def plan(tmp_path):
    """The plan of a config, as `plan --json` prints it; None if it does not fit."""

    def planned(config, *flags, adapter=LORA):
        file = tmp_path / "config.json"
        file.write_text(json.dumps(config))
        asked = ["plan", "--model", str(file), "--seq-length", "32", *adapter, "--json"]
        result = CliRunner().invoke(app, [*asked, *map(str, flags)])
        assert result.exit_code in (0, 3), result.output
        return json.loads(result.stdout)

    return planned


def weights(found):
    return sum(found["breakdown"].get(name, 0) for name in ("weights", "frozen weights"))


@pytest.mark.all
def test_experts_are_stacked_where_they_go_to_and_each_rank_has_its_own(plan):
    dense = {**MIXTURE, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
    mapped, alone, four = (
        plan(dense, "--num-gpus", "4"),
        plan(MIXTURE),
        plan(MIXTURE, "--num-gpus", "4"),
    )

    all_experts = LAYERS * OF_A_LAYER
    assert alone["host_moments"]["load"] > all_experts
    # each rank stacks its own, and the file that they read is there once
    assert four["host_moments"]["load"] > 4 * all_experts
    # weights that are used as they lie in the file are mapped, and there once for all ranks
    assert mapped["host_moments"]["load"] == pytest.approx(weights(mapped), rel=0.1)
    # TRL loads onto the card, where the stacks of one layer are twice for a moment
    on_card = plan(MIXTURE, "--trainer", "sft", "--dtype", "bf16", "--no-padding")
    load = on_card["moments"]["load"]["allocated_bytes"]
    assert all_experts + OF_A_LAYER / 3 < load
    assert load > alone["moments"]["load"]["allocated_bytes"] + OF_A_LAYER / 3


def test_weights_are_loaded_in_the_order_of_their_file():
    """Their blocks lie by it. A mixture of MiniMax names its experts by another word there."""
    config = transformers.MiniMaxConfig(
        **dict.fromkeys(("hidden_size", "intermediate_size", "vocab_size"), 64),
        **dict.fromkeys(("num_hidden_layers", "num_local_experts"), 2),
        **dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 2),
    )
    with torch.device("meta"):
        model = transformers.MiniMaxForCausalLM(config)
    made, in_turn = loading.each_alone(model, torch.device("meta"), torch.bfloat16)
    layer = "model.layers.0"
    kept = [name.removeprefix(layer) for name in in_turn if name.startswith(layer)]
    assert kept[:4] == [
        *(".mlp.experts.gate_up_proj", ".mlp.experts.down_proj", ".mlp.gate.weight"),
        ".input_layernorm.weight",
    ]
    assert {name for name in made if name.startswith(layer)} == {layer + each for each in kept[:2]}


ON_CARD = """
import os, sys
from dataclasses import replace
from tests.planner.test_loading import EXPERTS, MIXTURE, WIDE, ZERO_3
from tests.planner.test_plans import request
from trainer_plugins.planner.rehearse.watch import watch

asked = request(MIXTURE, num_gpus=4, sequence_length=32, dtype="bfloat16")
trace = watch(replace(asked, launch_file=ZERO_3)).trace
made = [trace.storages[event.number] for event in trace.events if event.kind == 1]
stacked = 2 * EXPERTS * 2 * WIDE * WIDE
print(sum((each.moment, each.num_bytes) == ("load", stacked) for each in made), flush=True)
os._exit(0)
"""


BY_TRL = """
import os
from tests.planner.test_loading import MIXTURE, WIDE, WORDS
from tests.planner.test_plans import request
from trainer_plugins.planner.rehearse.watch import watch

tied = {**MIXTURE, "tie_word_embeddings": True}
for given in (tied, {**tied, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}):
    found = watch(request(given, trainer="sft", rows=1, sequence_length=32, dtype="bfloat16"))
    made = [found.trace.storages[each.number] for each in found.trace.events if each.kind == 1]
    load = [each.num_bytes for each in made if each.moment == "load"]
    weights = 2 * found.num_parameters
    print("loads", load[1] - weights, load[0], load[2:].count(2 * WORDS * WIDE), flush=True)
os._exit(0)
"""


@pytest.mark.all
def test_trl_loads_each_weight_onto_one_card_into_the_block_that_transformers_made_for_them():
    """By device_map="auto", which looks for room with 8 bytes: 2 MiB are held, and left out."""
    done = processes.run([sys.executable, "-c", BY_TRL], check=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("loads")]
    assert lines == [f"loads {-(2 << 20)} 8 1"] * 2


@pytest.mark.all
def test_on_a_card_of_which_transformers_leaves_nothing_free_it_makes_no_block(plan):
    assert plan(MIXTURE, "--trainer", "sft", "--gpu", "1GiB")["moments"]["load"]


@pytest.mark.all
def test_experts_under_zero_3_are_gathered_once_to_be_loaded():
    """Each layer's gate and up: made, in the run's dtype, gathered for the file, and for the engine."""
    environ = environment(DS_ACCELERATOR="cuda")
    done = processes.run([sys.executable, "-c", ON_CARD], check=True, environ=environ)
    assert done.stdout.split()[-1] == str(4 * LAYERS)


@pytest.mark.all
def test_mxfp4_is_decoded_by_each_rank_whatever_divides_the_weights_later(plan):
    decoded = LAYERS * 4 * OF_A_LAYER
    for flags in (("--num-gpus", "4"), ("--num-gpus", "4", "--accelerate-config", ZERO_3)):
        found = plan(IN_MXFP4, *flags)
        assert found["moments"]["load"]["allocated_bytes"] > decoded
        assert found["host_moments"]["load"] > 4 * decoded
        assert any("mxfp4" in line for line in found["assumptions"])
        assert "quantised" not in found["planned"]
    # a checkpoint in bf16 is divided while it is read
    whole = {name: value for name, value in IN_MXFP4.items() if name != "quantization_config"}
    found = plan(whole, *flags)
    assert found["moments"]["load"]["allocated_bytes"] < decoded
    assert found["host_moments"]["load"] < decoded
    # the card cannot hold what a rank decodes: it is said where
    small = plan(IN_MXFP4, *flags, "--gpu", f"{decoded / GIB:.2f}GiB")
    assert small["fits"] is False
    assert small["failed_request"].endswith("load")


def test_what_an_adapter_adds_to_experts_is_made_for_all_of_a_layer(plan):
    def of(**more):
        peft = {"peft_type": "LORA", "r": 8, "target_modules": ["q_proj"], **more}
        flags = ("--peft-config", json.dumps(peft), "--bf16", "True", *CHECKPOINTING)
        return plan(MIXTURE, adapter=flags)

    experts = of(target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"])
    without = of()
    delta = experts["allocated_peak_bytes"] - without["allocated_peak_bytes"]
    assert delta > OF_A_LAYER
    (said,) = (line for line in experts["assumptions"] if "adapter adds to experts" in line)
    assert size(OF_A_LAYER) in said
    assert "target_parameters=None" in said
    assert not any("adapter adds" in line for line in without["assumptions"])


def test_a_quantised_mixture_says_what_is_not_quantised_and_what_would_be(plan):
    found = plan(MIXTURE, "--load-in-4bit", "--no-prepare-kbit", "--dtype", "bf16")

    many = size(LAYERS * OF_A_LAYER)
    assert f"except {many} of experts in 16 bits" in found["planned"]["quantised"]
    assert any(many in line and "quantize_moe_experts" in line for line in found["assumptions"])
    # the stacks of the last layer are made beside all that is loaded already
    load = found["moments"]["load"]["allocated_bytes"]
    assert load > LAYERS * OF_A_LAYER + OF_A_LAYER / 3


@pytest.mark.all
def test_one_memory_for_both_holds_the_process_too_and_the_model_twice_while_it_loads(plan):
    """As of GB10, Jetson and Apple: the same run on a card of that size, and in one memory."""
    card, both = plan(MIXTURE, "--gpu", "3GiB"), plan(MIXTURE, "--gpu", "3GiB unified")

    assert card["fits"] is both["fits"] is True
    outside = both["context_bytes"] - card["context_bytes"]
    assert outside >= both["host_process_bytes_per_node"] > 0
    assert both["nvidia_smi_peak_bytes"] - card["nvidia_smi_peak_bytes"] == outside
    assert any("is the main memory too" in line for line in both["assumptions"])
    # the stacked experts are in main memory when they are moved
    load = card["moments"]["load"]["reserved_bytes"] + both["host_moments"]["load"]
    short = (load + both["host_process_bytes_per_node"] + card["context_bytes"]) / GIB - 0.01
    small = plan(MIXTURE, "--gpu", f"{short:.3f}GiB unified")
    assert small["fits"] is False
    assert "the load needs" in small["host_shortage"]
