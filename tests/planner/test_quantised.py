"""Bases quantised by bitsandbytes: what they take follows from their bits, and the rest is refused by name."""

import json
import os
import sys
import weakref
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import transformers
from typer.testing import CliRunner

from tests import processes
from tests.planner.test_plans import CHECKPOINTING, Plans, request
from trainer_plugins.cli import app
from trainer_plugins.planner import MemoryPlan, NotPredicted, PlanError
from trainer_plugins.planner.compare.switches import BASE_IN_4_BITS, source_of, with_base_in_4_bits
from trainer_plugins.planner.pretend import quantised
from trainer_plugins.units import size

pytest.importorskip("peft")
IS_TOO_OLD = transformers.__version__.startswith("4.")
needs_5 = pytest.mark.skipif(IS_TOO_OLD, reason="transformers 4 is refused, and the plan says so")

ROOT = Path(__file__).parents[2]
HIDDEN, WIDE, LAYERS, WORDS = 512, 2048, 2, 1024
LLAMA = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": WIDE,
    "num_hidden_layers": LAYERS,
    "vocab_size": WORDS,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
IN_A_LAYER = 4 * HIDDEN * HIDDEN + 3 * HIDDEN * WIDE
QUANTISED = LAYERS * IN_A_LAYER
SKIPPED = 2 * WORDS * HIDDEN + (2 * LAYERS + 1) * HIDDEN  # embeddings, head and norms
LORA = {"peft_type": "LORA", "r": 8, "target_modules": ["q_proj", "down_proj"]}
NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "bfloat16"}
INT8 = {"load_in_8bit": True}
INT8_LAYER = quantised.Linear8bitLt(64, 64, bias=False, has_fp16_weights=False, threshold=6.0)


def planned(quantisation=None, *flags, peft=LORA, prepares=True, **changed):
    return request(
        {**LLAMA, **changed},
        *("--bf16", "True", *flags),
        sequence_length=64,
        peft=peft,
        quantisation=quantisation,
        prepares_kbit=prepares,
    )


EXPERTS, BYTES_OF_EXPERTS = (
    {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        **dict.fromkeys(("hidden_size", "intermediate_size", "moe_intermediate_size"), 512),
        **dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 4),
        "head_dim": 128,
        "num_experts": 96,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 3,
        "vocab_size": 1024,
        "tie_word_embeddings": False,
    },
    2 * 3 * 96 * 3 * 512 * 512,
)
"""A mixture of which bitsandbytes quantises no expert, and what they take in bf16."""


def of_experts(quantisation, gpu: str):
    asked = request(
        EXPERTS,
        *("--bf16", "True", *CHECKPOINTING),
        gpu=gpu,
        sequence_length=32,
        peft={**LORA, "target_modules": ["q_proj"]},
        quantisation=quantisation,
    )
    return replace(asked, proposes=True)


REQUESTS = {
    "whole": planned(None, *CHECKPOINTING),
    "nf4": planned(NF4),
    "unchecked": planned(NF4, "--gradient_checkpointing", "False"),
    "fp4": planned({**NF4, "bnb_4bit_quant_type": "fp4"}),
    "double": planned({**NF4, "bnb_4bit_use_double_quant": True}),
    "bf16 storage": planned({**NF4, "bnb_4bit_quant_storage": "bfloat16"}),
    "packed already": planned(quantization_config={**NF4, "quant_method": "bitsandbytes"}),
    "not prepared": planned(NF4, *CHECKPOINTING, prepares=False),
    "with its MLPs whole": planned(
        {**NF4, "llm_int8_skip_modules": ["lm_head", "gate_proj", "up_proj", "down_proj"]}
    ),
    "int8": planned(INT8),
    "no adapter": planned(NF4, peft=None),
    "experts": of_experts(NF4, "1300MiB,sm_90"),
    "gptq": planned(quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 128}),
    "unknown": planned(quantization_config={"quant_method": "foo"}),
    "trained in int8": planned({**INT8, "llm_int8_has_fp16_weight": True}),
}


@pytest.fixture(scope="module")
def outcomes():
    return Plans(REQUESTS)


@pytest.fixture(scope="module")
def frozen(outcomes):
    """Bytes of frozen weights at the peak, by plan."""

    class Frozen(dict[str, int]):
        def __missing__(self, name: str) -> int:
            return outcomes[name].breakdown["frozen weights"]

    return Frozen()


@pytest.mark.all
@needs_5
def test_a_quantised_base_takes_what_its_bits_take(frozen):
    scales = 4 * QUANTISED // 64
    near = 0.01  # blocks of 512 bytes, and what is left of a large block
    assert frozen["whole"] == pytest.approx(2 * QUANTISED + 2 * SKIPPED, rel=near)
    assert frozen["nf4"] == pytest.approx(QUANTISED // 2 + scales + 4 * SKIPPED, rel=near)
    assert frozen["fp4"] == frozen["bf16 storage"] == frozen["nf4"]
    assert frozen["packed already"] == pytest.approx(frozen["nf4"], rel=near)
    assert frozen["int8"] == pytest.approx(QUANTISED + 4 * SKIPPED, rel=near)
    of_scales = scales // 4 + scales // 256
    assert frozen["double"] == pytest.approx(QUANTISED // 2 + of_scales + 4 * SKIPPED, rel=near)
    assert frozen["not prepared"] == pytest.approx(QUANTISED // 2 + scales + 2 * SKIPPED, rel=near)
    mlps = LAYERS * 3 * HIDDEN * WIDE
    assert frozen["with its MLPs whole"] == pytest.approx(
        (QUANTISED - mlps) * (1 / 2 + 4 / 64) + 4 * (mlps + SKIPPED), rel=near
    )


@pytest.mark.all
@needs_5
def test_experts_that_stay_in_32_bits_are_said_and_what_leaves_them_in_16_is_offered(outcomes):
    plan = outcomes["experts"]
    assert plan.fits is False
    (said,) = [line for line in plan.assumptions if "of experts" in line]
    assert said.startswith(f"{size(2 * BYTES_OF_EXPERTS)} of experts stay in 32 bits")
    assert "--no-prepare-kbit" in said
    assert f"except {size(2 * BYTES_OF_EXPERTS)} of experts in 32 bits" in plan.planned["quantised"]
    best = plan.proposals[0]
    assert best.flags == "--no-prepare-kbit"
    assert plan.reserved_peak_bytes - best.reserved_peak_bytes > 0.9 * BYTES_OF_EXPERTS


def test_a_base_in_4_bits_is_proposed_as_nf4():
    assert source_of(with_base_in_4_bits(REQUESTS["whole"])).quantisation == NF4
    flags = BASE_IN_4_BITS.flags.split()
    assert flags[flags.index("--bnb-4bit-quant-type") + 1] == NF4["bnb_4bit_quant_type"]


@needs_5
def test_main_memory_never_holds_the_whole_base(outcomes):
    assert outcomes["whole"].host_ram_bytes_per_node > 2 * QUANTISED
    assert outcomes["nf4"].host_ram_bytes_per_node < QUANTISED // 2
    assert outcomes["int8"].host_ram_bytes_per_node < QUANTISED // 2


@needs_5
def test_a_packed_weight_counts_as_the_numbers_it_stands_for(outcomes):
    counts = {outcomes[name].num_parameters for name in ("whole", "nf4", "int8", "bf16 storage")}
    assert len(counts) == 1
    assert outcomes["nf4"].num_trainable_parameters == outcomes["whole"].num_trainable_parameters


@pytest.mark.parametrize(
    ("layer", "keeps"),
    [(quantised.Linear4bit(64, 64, bias=False), False), (INT8_LAYER, True)],
    ids=["nf4", "int8"],
)
def test_only_int8_keeps_its_input_for_the_backward(layer, keeps):
    layer.load(torch.device("cpu"), torch.float16, is_packed=False)
    leaf = torch.ones(3, 5, 64, requires_grad=True)
    x = leaf * 2
    input_of_layer = weakref.ref(x.untyped_storage())
    made = layer(x)
    del x
    assert (input_of_layer() is not None) is keeps
    made.sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.shape == leaf.shape
    assert made.dtype == torch.float32


@needs_5
def test_what_prepares_the_model_is_said(outcomes):
    def said(name):
        return any("prepare_model_for_kbit_training" in line for line in outcomes[name].assumptions)

    assert said("nf4")
    assert not said("not prepared")
    on, off = outcomes["nf4"], outcomes["unchecked"]
    assert on.planned["checkpointing"] == "on, by prepare_model_for_kbit_training"
    assert off.planned["checkpointing"] == "off"
    kept = LAYERS * 64 * WIDE * 2
    assert off.allocated_peak_bytes > on.allocated_peak_bytes + kept
    assert any("outlier" in line for line in outcomes["int8"].assumptions)


@needs_5
@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("no adapter", PlanError, "purely quantized models"),
        ("gptq", NotPredicted, f"its 4-bit weights alone are {QUANTISED / 2 / 2**20:.1f} MiB"),
        ("unknown", PlanError, "no quantisation is named 'foo'"),
        ("trained in int8", NotPredicted, "llm_int8_has_fp16_weight"),
    ],
)
def test_what_is_not_planned_is_said_in_one_line(outcomes, name, kind, words):
    refusal = outcomes[name]
    assert type(refusal) is kind, refusal
    assert words in str(refusal)
    assert "\n" not in str(refusal)


@pytest.mark.parametrize(
    ("flags", "config", "words"),
    [
        (["--load-in-4bit", "--load-in-8bit"], {}, "give one"),
        (["--bnb-4bit-quant-type", "nf4"], {}, "--load-in-4bit"),
        (["--load-in-4bit", "--bnb-4bit-quant-type", "nf5"], {}, "nf4, fp4, got 'nf5'"),
        (["--load-in-4bit", "--bnb-4bit-compute-dtype", "half"], {}, "float32, float16, bfloat16"),
        (["--load-in-8bit", "--bnb-4bit-use-double-quant"], {}, "belongs to --load-in-4bit"),
        (["--no-prepare-kbit"], {}, "for a quantised base"),
        pytest.param(
            *(["--engine", "dry", "--gpu", "8GiB", "--load-in-4bit"], {}, "pip install bitsandb"),
            marks=pytest.mark.skipif(find_spec("bitsandbytes") is not None, reason="it is there"),
        ),
        (["--load-in-4bit"], {"quantization_config": {"quant_method": "gptq"}}, "quantise it once"),
    ],
)
def test_flags_that_do_not_go_together_are_refused_at_once(tmp_path, flags, config, words):
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **config}))
    done = CliRunner().invoke(app, ["plan", "--model", str(tmp_path), *flags])
    assert done.exit_code == 2, done.output
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1


PACKAGE = {
    "__init__.py": "from bitsandbytes import functional, nn\n__version__ = '0.50.1'\n",
    "functional.py": "class QuantState:\n    pass\n",
    "nn/__init__.py": "from bitsandbytes.nn.modules import Linear4bit, Linear8bitLt\n",
    "nn/modules.py": """
import torch

class Linear8bitLt(torch.nn.Linear):
    pass

class Linear4bit(torch.nn.Linear):
    def __init__(self, rows, columns, bias, compute_dtype, device=None, **others):
        super().__init__(rows, columns, bias, device)
        self.weight.requires_grad_(False)
        self.compute_dtype, self.compute_type_is_set, self.quant_state = compute_dtype, True, None
        self.quant_storage = torch.uint8
""",
}
"""A package with the names and attributes of bitsandbytes, as far as a Trainer's model has them."""

SIZES = {key: value for key, value in LLAMA.items() if key != "model_type"}
SCRIPT = f"""
from pathlib import Path
import peft, torch
from bitsandbytes import functional, nn
from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.quantizers.auto import AutoHfQuantizer
from trainer_plugins import plan_run

model = LlamaForCausalLM(LlamaConfig(**{SIZES!r})).bfloat16()
quantizer = AutoHfQuantizer.from_config(BitsAndBytesConfig(**{NF4!r}), pre_quantized=False)
quantizer.preprocess_model(model=model, device_map={{"": "cpu"}})
for layer in model.modules():
    if isinstance(layer, nn.Linear4bit):
        numel = layer.weight.numel()
        state = layer.quant_state = functional.QuantState()
        state.state2 = state.offset = None
        state.absmax, state.code = torch.zeros(numel // 64), torch.zeros(16)
        state.shape, state.dtype = layer.weight.shape, torch.bfloat16
        layer.weight = torch.nn.Parameter(torch.zeros(numel // 2, 1, dtype=torch.uint8), False)
        layer.weight.compress_statistics, layer.weight.quant_type = False, "nf4"
model.hf_quantizer, model.hf_device_map = quantizer, {{"": torch.device("cpu")}}
model = peft.prepare_model_for_kbit_training(quantizer.postprocess_model(model))
model = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules=["q_proj", "down_proj"]))
assert type(model.base_model.model.model.layers[0].mlp.down_proj).__module__ == "peft.tuners.lora.bnb"
row = {{"input_ids": list(range(64)), "labels": list(range(64))}}
args = TrainingArguments("runs", report_to="none", per_device_train_batch_size=1, save_strategy="no")
plan = plan_run(Trainer(model=model, args=args, train_dataset=[row] * 4), gpu="24GiB")
Path("plan.json").write_text(plan.to_json())
"""


@pytest.mark.all
@needs_5
@pytest.mark.slow
def test_a_trainer_whose_base_is_quantised_is_planned_as_its_config(tmp_path, frozen, outcomes):
    for name, text in PACKAGE.items():
        file = tmp_path / "bitsandbytes" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    done = processes.run(
        [sys.executable, "-c", SCRIPT],
        environ={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}", "HF_HUB_OFFLINE": "1"},
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    plan = MemoryPlan.from_json((tmp_path / "plan.json").read_text())
    assert plan.num_parameters == outcomes["nf4"].num_parameters
    assert plan.breakdown["frozen weights"] == pytest.approx(frozen["nf4"], rel=0.01)


@pytest.mark.skipif(not IS_TOO_OLD, reason="this transformers is planned")
def test_transformers_4_is_refused_by_name(outcomes):
    assert isinstance(outcomes["nf4"], NotPredicted)
    assert "with transformers 4" in str(outcomes["nf4"])
