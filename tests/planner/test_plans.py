"""Plans for real cards, against what arithmetic knows about them; each on the dry card.

Nothing is downloaded.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from tests.processes import ENDS_A_HANG
from trainer_plugins import MemoryPlan, checkpointing, plan_run
from trainer_plugins.drycuda.predict import predict_all
from trainer_plugins.planner.cards import CARDS, card_of
from trainer_plugins.planner.plan import MOMENTS, NotPredicted, PlanError
from trainer_plugins.planner.request import ConfigSource, PlanRequest
from trainer_plugins.units import GIB, MIB

CONFIGS = Path(__file__).parent / "configs"
LORA = {"peft_type": "LORA", "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
TWO_LAYERS = {"num_hidden_layers": 2}
ADAM = ("--optim", "adamw_torch_fused")
CHECKPOINTING = (
    *("--gradient_checkpointing", "True"),
    *("--gradient_checkpointing_kwargs", '{"use_reentrant": false}'),
)
REENTRANT = ("--gradient_checkpointing_kwargs", '{"use_reentrant": true}')


def request(
    config,
    *flags,
    rows=1,
    gpu="h100-80gb",
    allocator="",
    num_gpus=1,
    padded=False,
    changed=(),
    dtype="bfloat16",
    **source,
) -> PlanRequest:
    content = (
        json.loads((CONFIGS / f"{config}.json").read_text()) if isinstance(config, str) else config
    )
    content = {**content, **dict(changed)}
    arguments = ("--output_dir", "runs", "--per_device_train_batch_size", str(rows), *flags)
    return PlanRequest(
        source=ConfigSource(config=content, arguments=arguments, dtype=dtype, **source),
        card=card_of(gpu),
        allocator=allocator,
        num_gpus=num_gpus,
        has_padding=padded,
    )


def tiny(**fields) -> dict:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "vocab_size": 512}
    return {
        "model_type": "llama",
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        **sizes,
        **fields,
    }


EIGHT_ROWS = request("llama-3-8b", *CHECKPOINTING, *ADAM, rows=8, gpu="34GiB", changed=TWO_LAYERS)
REQUESTS = {
    "8b": request("llama-3-8b", *CHECKPOINTING, *ADAM),
    "8 rows": EIGHT_ROWS,
    "8 rows, expandable": replace(EIGHT_ROWS, allocator="expandable_segments:True"),
    "fused": request("llama-3-8b", *ADAM, changed=TWO_LAYERS),
    "foreach": request("llama-3-8b", "--optim", "adamw_torch", changed=TWO_LAYERS),
    "autocast": request("llama-3-8b", *ADAM, "--bf16", "True", dtype="float32", changed=TWO_LAYERS),
    "qwen lora": request(
        "qwen2.5-7b", *CHECKPOINTING, gpu="rtx4090", sequence_length=1024, peft={**LORA, "r": 128}
    ),
    "t5-xl": request(
        "t5-xl", *CHECKPOINTING, "--bf16", "True", rows=8, sequence_length=512, dtype="float32"
    ),
    "mixtral": request("mixtral-4.7b", *CHECKPOINTING, rows=2, sequence_length=1024),
    "bert": request("bert-base", rows=16, sequence_length=512, dtype="float32"),
    "bert, padded": request(
        "bert-base", rows=16, sequence_length=512, dtype="float32", padded=True
    ),
    # What is wrong, and what nothing is known about.
    "no model": request({"hello": 1}),
    "unknown model": request({"model_type": "no-such-model"}),
    "sizes": request(tiny(hidden_size=-4)),
    "no target": request(tiny(), peft={"peft_type": "LORA", "r": 4, "target_modules": ["nowhere"]}),
    "flag": request(tiny(), "--gradient_checkpoint", "True"),
    "flag of another program": request(tiny(), "--batch_size", "4"),
    "contradiction": request(tiny(), "--bf16", "True", "--fp16", "True"),
    "dtype": request(tiny(), dtype="int8"),
    "allocator": request(tiny(), allocator="max_split_size_mb:3"),
    "zero": request(
        tiny(), "--deepspeed", '{"zero_optimization": {"stage": 3, "reduce_bucket": 1}}', num_gpus=2
    ),
}


class Plans(dict[str, MemoryPlan | PlanError]):
    """The plans of requests by name, each made when it is asked for."""

    def __init__(self, requests: Mapping[str, PlanRequest]) -> None:
        self._requests = requests

    def __missing__(self, name: str) -> MemoryPlan | PlanError:
        (self[name],) = predict_all([self._requests[name]], ENDS_A_HANG)
        return self[name]


@pytest.fixture(scope="module")
def outcomes() -> Plans:
    return Plans(REQUESTS)


def plan_of(outcomes, name) -> MemoryPlan:
    plan = outcomes[name]
    assert isinstance(plan, MemoryPlan), plan
    assert sum(plan.breakdown.values()) == plan.allocated_peak_bytes <= plan.reserved_peak_bytes
    assert set(plan.moments) <= set(MOMENTS)
    assert (
        max(peak.allocated_bytes for peak in plan.moments.values())
        >= plan.moments[plan.moment].allocated_bytes
    )
    assert plan.nvidia_smi_peak_bytes == plan.reserved_peak_bytes + plan.context_bytes
    return plan


def test_llama_3_8b_has_its_parameters_and_twelve_bytes_for_each(outcomes):
    plan = plan_of(outcomes, "8b")
    assert plan.num_parameters == plan.num_trainable_parameters == 8_030_261_248
    in_bf16 = 2 * plan.num_parameters
    assert plan.breakdown["weights"] == pytest.approx(in_bf16, rel=1e-3)
    assert plan.breakdown["gradients"] == pytest.approx(in_bf16, rel=4e-3)
    assert plan.breakdown["optimizer states"] == pytest.approx(2 * in_bf16, rel=1e-3)
    assert plan.fits is True
    assert max(plan.groups_at_peak, key=lambda each: each.num_bytes).part in (
        "embed_tokens",
        "lm_head",
    )


@pytest.mark.all
def test_foreach_needs_the_model_once_more(outcomes):
    """torch/optim/adamw.py, _multi_tensor_adamw: the square roots of all second moments at once."""
    fused, foreach = plan_of(outcomes, "fused"), plan_of(outcomes, "foreach")
    more = (
        foreach.moments["optimizer step"].allocated_bytes
        - fused.moments["optimizer step"].allocated_bytes
    )
    assert more == pytest.approx(2 * fused.num_parameters, rel=1e-3)
    assert foreach.moment == "optimizer step"


@pytest.mark.all
def test_three_copies_of_the_logits_in_float(outcomes):
    """Upcast, log-softmax, and its gradient (transformers/loss/loss_utils.py; torch's cross entropy)."""
    plan = plan_of(outcomes, "8 rows")
    assert plan.breakdown["logits and loss"] == pytest.approx(3 * 4 * 8 * 2048 * 128256, rel=0.01)
    assert plan.moment == "backward"


@pytest.mark.all
def test_expandable_segments_save_a_run_that_does_not_fit(outcomes):
    default, expandable = plan_of(outcomes, "8 rows"), plan_of(outcomes, "8 rows, expandable")
    assert default.fits is False
    assert default.smallest_card_bytes is not None
    assert expandable.smallest_card_bytes is not None
    assert default.smallest_card_bytes > 34 * GIB > expandable.smallest_card_bytes
    assert expandable.fits is True
    assert expandable.allocated_peak_bytes == pytest.approx(default.allocated_peak_bytes, rel=0.001)


def test_autocast_keeps_sixteen_bytes_for_each_parameter(outcomes):
    plan = plan_of(outcomes, "autocast")
    assert plan.moments["optimizer step"].allocated_bytes == pytest.approx(
        16 * plan.num_parameters, rel=0.01
    )


@pytest.mark.all
def test_lora_of_a_7b_model_on_24_gb(outcomes):
    plan = plan_of(outcomes, "qwen lora")
    frozen = plan.num_parameters - plan.num_trainable_parameters
    assert frozen == 7_615_616_512
    # 18944 * 3584 numbers are 129.5 MiB: the segment has 130, and what is left of it is too small
    # to be split off.
    assert plan.breakdown["frozen weights"] == pytest.approx(
        2 * frozen + 28 * 3 * MIB // 2, rel=1e-3
    )
    assert plan.breakdown["weights"] == pytest.approx(
        4 * plan.num_trainable_parameters, rel=0.02
    )  # adapters in float
    assert plan.fits is True
    assert plan.gpu == "rtx4090"


@pytest.mark.all
def test_an_encoder_decoder(outcomes):
    plan = plan_of(outcomes, "t5-xl")
    assert (
        plan.num_parameters == 2_849_757_184
    )  # of google/t5-v1_1-xl, whose head has weights of its own
    assert plan.moments["save"].allocated_bytes == pytest.approx(12 * plan.num_parameters, rel=0.01)


@pytest.mark.all
def test_experts_are_all_there(outcomes):
    plan = plan_of(outcomes, "mixtral")
    experts = 16 * 8 * 3 * 2048 * 5632
    assert experts < plan.num_parameters < 1.1 * experts
    assert plan.fits is True


@pytest.mark.all
def test_padding_makes_masks(outcomes):
    assert (
        plan_of(outcomes, "bert, padded").allocated_peak_bytes
        > plan_of(outcomes, "bert").allocated_peak_bytes + 12 * MIB
    )


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("no model", "the config is not a model's config.json: it has no model_type"),
        ("unknown model", "has no model_type 'no-such-model'"),
        ("sizes", "transformers cannot build the model of this config"),
        ("no target", "the dry run failed: .*Error: Target modules .*nowhere.* not found"),
        ("flag", f"unknown option --gradient_checkpoint: .* Did you mean --{checkpointing.NAME}?"),
        (
            "flag of another program",
            "unknown option --batch_size: .* Did you mean --per-device-train-batch-size?",
        ),
        ("contradiction", "At most one of fp16 and bf16 can be True"),
        ("dtype", "--dtype needs float32, bfloat16 or float16, got 'int8'"),
        pytest.param(
            "zero",
            "the DeepSpeed config: zero_optimization.reduce_bucket is not a known key",
            marks=pytest.mark.all,
        ),
        ("allocator", "allocator settings: max_split_size_mb needs at least 20"),
    ],
)
def test_bad_input_is_one_line(outcomes, name, line):
    error = outcomes[name]
    assert isinstance(error, PlanError), error
    assert not isinstance(error, NotPredicted)
    with pytest.raises(PlanError, match=line.replace("?", r"\?")):
        raise error
    assert "\n" not in str(error)


def test_a_plan_survives_json(outcomes):
    plan = plan_of(outcomes, "8b")
    assert MemoryPlan.from_json(plan.to_json()) == plan
    flat = json.loads(plan.to_json())
    assert {
        *(
            "allocated_peak_bytes",
            "reserved_peak_bytes",
            "nvidia_smi_peak_bytes",
            "host_ram_bytes_per_node",
        ),
        *("capacity_bytes", "fits", "moment", "breakdown", "not_reliable"),
    } <= set(flat)
    with pytest.raises(ValueError, match="not a memory plan"):
        MemoryPlan.from_json("{}")
    for misspelt, line in (
        ({"moment": "eval"}, "'eval' is none of load"),
        ({"moments": {"eval": {"allocated_bytes": 1, "reserved_bytes": 1}}}, "'eval' is none of"),
        ({"breakdown": {"activation": 512}}, "'activation' is none of weights"),
    ):
        with pytest.raises(ValueError, match=line):
            MemoryPlan.from_json(json.dumps({**flat, **misspelt}))


def test_a_prediction_that_takes_too_long_is_given_up():
    plan_run(tiny(), {"output_dir": "runs"})  # now the imports take no time
    with pytest.raises(PlanError, match="took more than 0 s: raise --timeout"):
        plan_run(tiny(), {"output_dir": "runs"}, timeout_seconds=0.01)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("h100", "unknown GPU 'h100': did you mean h100-80gb or h100-pcie or h100-nvl?"),
        ("a100", "did you mean a100-40gb or a100-80gb?"),
        ("RTX 4090 Ti", "or rtx4090?"),
        ("rtx4090 48GB", "did you mean rtx4090"),
        ("24GiB,sm_77", "no card here has the capability sm_77"),
        ("0GiB", "--gpu: a size is a positive number"),
    ],
)
def test_a_card_nobody_knows(text, line):
    with pytest.raises(PlanError, match=line.replace("?", r"\?")):
        card_of(text)


@pytest.mark.parametrize(
    ("text", "name", "capability"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100-80gb", (8, 0)),
        ("A100-PCIE-40GB", "a100-40gb", (8, 0)),
        ("NVIDIA H100 80GB HBM3", "h100-80gb", (9, 0)),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", "rtx4070tisuper", (8, 9)),
        ("rtx5090 laptop", "rtx5090laptop", (12, 0)),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "rtxpro6000", (12, 0)),
        ("rtx 6000 pro", "rtxpro6000", (12, 0)),
        ("a6000", "rtxa6000", (8, 6)),
        ("NVIDIA A10G", "a10g", (8, 6)),
        ("h200", "h200-141gb", (9, 0)),
        ("b300", "b300", (10, 3)),
        ("mi300x", "mi300x", (9, 0)),
        ("15.99GiB", "15.99GiB", (8, 9)),
        ("15.99 GiB, sm_80", "15.99 GiB, sm_80", (8, 0)),
        ("80GiB,sm_100", "80GiB,sm_100", (10, 0)),
    ],
)
def test_a_card_is_known_as_the_driver_and_shops_call_it(text, name, capability):
    found = card_of(text)
    assert (found.name, found.capability) == (name, capability)
    assert ("kernels" in found.guess) is (text in ("15.99GiB", "mi300x"))


def test_each_card_of_the_table_is_found_by_its_name():
    for card in CARDS:
        assert card_of(card.name) is card
        assert card.of_multiprocessor[0] in (1024, 1536, 2048)


@pytest.mark.all
def test_a_trainer_made_for_the_cpu_because_no_card_is_there_is_planned(make_trainer):
    plan = plan_run(make_trainer(bf16=True, use_cpu=True), gpu="l4")
    assert plan.planned["dtype"].endswith("autocast to bf16")
    assert plan.fits


@pytest.mark.parametrize(
    "given",
    [
        {"training_args": {"output_dir": "runs"}},
        {"seq_length": 4096},
        {"target_length": 64},
        {"padding": False},
        {"dtype": "bfloat16"},
        {"peft_config": LORA},
        {"accelerate_config": "/no/such/file"},
    ],
)
def test_what_is_for_a_config_is_refused_with_a_trainer(make_trainer, given):
    (name,) = given
    with pytest.raises(PlanError, match=f"with a Trainer you cannot pass {name}: "):
        plan_run(make_trainer(), **given)
