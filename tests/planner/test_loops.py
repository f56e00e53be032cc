"""TRL's Trainers from a config and flags: `--trainer`, whose rows are as long as it is told."""

from dataclasses import replace

import pytest
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from tests.planner.test_closed_loop_trl import HAS_HEAD, tokenizer
from tests.planner.test_plans import Plans, request, tiny
from trainer_plugins.cli import app
from trainer_plugins.planner import MemoryPlan, plan_run
from trainer_plugins.planner.cards import card_of
from trainer_plugins.planner.inputs import ConfigInputs, RunInputs, arguments_to_send, request_of
from trainer_plugins.planner.request import TRL_TRAINERS, PlanRequest
from trainer_plugins.report.plan_text import verdict

pytestmark = pytest.mark.skipif(not HAS_HEAD, reason="this TRL has no head of its own")

LORA = {"peft_type": "LORA", "r": 4, "target_modules": "all-linear"}
FOUR = ("--num_generations", "4", "--max_completion_length", "40", "--beta", "0.04")
ONE_ROW = ("--per_device_train_batch_size", "1")
MORE_TOKENS = 1024
EVALUATED = ("--do_eval", "True", "--per_device_eval_batch_size", "6", "--bf16", "False")
VLLM = ("--use_vllm", "True", "--vllm_gpu_memory_utilization", "0.25")


def looped(trainer, *flags, **fields):
    fields = {"sequence_length": 64, "dtype": None, "rows": 4, "padded": None, **fields}
    return request(tiny(), *flags, trainer=trainer, **fields)


def uncut(trainer) -> PlanRequest:
    cpo = pytest.importorskip("trl.experimental.cpo")
    asked = looped(trainer, sequence_length=2048)
    arguments = arguments_to_send(cpo.CPOConfig("runs", max_length=None, bf16=False))
    return replace(asked, source=replace(asked.source, arguments=arguments))


def as_typed(trainer, *flags, gpu="h100-80gb", seq_length=None, wide=64, cards=1) -> PlanRequest:
    config = tiny(vocab_size=50_000, hidden_size=wide)
    lora = LORA if trainer == "sft" else None
    details = ConfigInputs(flags, seq_length, peft_config=lora, trainer=trainer)
    return replace(request_of(config, details, RunInputs(gpu, num_gpus=cards)), proposes=wide > 64)


REQUESTS = {
    "as TRL cuts": as_typed("sft"),
    "a length": as_typed("sft", seq_length=1500),
    "a length that is cut": as_typed("sft", "--max-length=100", seq_length=1500),
    "a base too large in float32": as_typed("sft", gpu="700MiB", seq_length=8, wide=512),
    "eight cards": as_typed("grpo", *FOUR, *ONE_ROW, seq_length=64, cards=8),
    "sft": looped("sft", peft=LORA),
    "dpo": looped("dpo"),
    "dpo, asked before": looped("dpo", "--precompute_ref_log_probs", "True"),
    "kto, asked before": looped("kto", "--precompute_ref_log_probs", "True"),
    "kto": looped("kto"),
    "reward": looped("reward"),
    "grpo": looped("grpo", *FOUR),
    "grpo, longer": looped(
        "grpo",
        *FOUR,
        *("--max_completion_length", str(40 + MORE_TOKENS)),
        sequence_length=64 + MORE_TOKENS,
    ),
    "grpo, longer prompts": looped("grpo", *FOUR, sequence_length=64 + MORE_TOKENS),
    "grpo, vllm": looped("grpo", *FOUR, *VLLM, gpu="8GiB"),
    "grpo, vllm sleeps": looped("grpo", *FOUR, *VLLM, "--vllm_enable_sleep_mode", "True"),
    "grpo, two cards": looped("grpo", *FOUR, num_gpus=2),
    "rloo": looped("rloo", *FOUR, peft=LORA),
    "gmpo": looped("gmpo", *FOUR),
    "orpo": looped("orpo"),
    "cpo": looped("cpo", peft=LORA),
    "tpo": looped("tpo"),
    "no room": looped("grpo", "--max_completion_length", "64", rows=8),
    "groups": looped("grpo", "--num_generations", "3"),
    "no such flag": looped("grpo", "--max_prompt_lenght", "3", rows=8),
    "evaluates": looped("grpo", *FOUR, "--do_eval", "True"),
    "packed": looped("sft", "--packing", "True", "--max_length", "64", *EVALUATED),
    "whole": looped("sft", "--max_length", "64", *EVALUATED),
    "cut": looped("sft", "--max_length", "32"),
    "cut, though nobody said so": uncut("cpo"),
}


@pytest.fixture(scope="module")
def outcomes() -> Plans:
    return Plans(REQUESTS)


def plan_of(outcomes, name: str) -> MemoryPlan:
    plan = outcomes[name]
    assert isinstance(plan, MemoryPlan), plan
    return plan


@pytest.mark.all(unless=lambda name: name in ("sft", "dpo", "grpo"))
@pytest.mark.parametrize("name", TRL_TRAINERS)
def test_each_loop_trains_and_says_what_it_took_for_granted(outcomes, name: str):
    plan = plan_of(outcomes, name)
    assert plan.planned["trainer"].casefold() == f"trl's {name}trainer"
    assert plan.planned["dtype"] == "float32 (TRL's default: see --dtype), autocast to bf16"
    assert plan.planned["checkpointing"] == "on"
    assert any("see --dtype" in line for line in plan.assumptions)


def test_adapters_are_less_than_the_model(outcomes):
    assert (
        plan_of(outcomes, "sft").num_trainable_parameters < plan_of(outcomes, "dpo").num_parameters
    )


@pytest.mark.all(unless=lambda name: name in ("dpo", "grpo"))
@pytest.mark.parametrize("name", ["dpo", "kto", "grpo", "gmpo"])
def test_a_reference_is_a_second_model(outcomes, name):
    plan = plan_of(outcomes, name)
    assert plan.moments["load"].allocated_bytes > 1.9 * 4 * plan.num_parameters


@pytest.mark.parametrize("name", ["dpo", pytest.param("kto", marks=pytest.mark.all)])
def test_a_reference_that_is_asked_before_the_training_is_not_loaded(outcomes, name):
    kept, asked = plan_of(outcomes, name), plan_of(outcomes, f"{name}, asked before")
    saved = kept.allocated_peak_bytes - asked.allocated_peak_bytes
    assert saved > 0.9 * 4 * kept.num_parameters
    assert any("before the training (precompute_ref_log_probs)" in s for s in asked.assumptions)


@pytest.mark.all
def test_what_generates_says_how_a_row_is_made_up(outcomes):
    said = plan_of(outcomes, "grpo").assumptions
    assert any("prompts have 24 tokens" in line for line in said)
    assert "generation" in plan_of(outcomes, "rloo").moments
    assert "generation" not in plan_of(outcomes, "dpo").moments


@pytest.mark.all
def test_the_kv_cache_grows_with_each_token_though_few_are_computed(outcomes):
    """Keys and values of 2 to 4 bytes a number, and copies of them while they grow and are read."""
    short, long = (
        plan_of(outcomes, name).moments["generation"].allocated_bytes
        for name in ("grpo", "grpo, longer")
    )
    rows, hidden = 4, 64
    least = 2 * rows * MORE_TOKENS * hidden * 2
    assert least <= long - short <= 6 * least


@pytest.mark.all
def test_only_the_tokens_of_completions_are_scored(outcomes):
    """TRL's fused head makes logits of 32,768 words at once, of each token that labels pick."""
    pytest.importorskip("trl.kernels.chunked_logprob")
    of_prompts, of_completions = (
        plan_of(outcomes, name).moments["backward"].allocated_bytes
        for name in ("grpo, longer prompts", "grpo, longer")
    )
    tile = 4 * MORE_TOKENS * 32_768 * 2
    assert 0.9 * tile < of_completions - of_prompts < 1.2 * tile


@pytest.mark.all
def test_on_two_cards_each_generates_its_own_rows(outcomes):
    assert plan_of(outcomes, "grpo, two cards").num_gpus == 2


@pytest.mark.all
def test_vllm_takes_its_part_of_the_card(outcomes):
    card = card_of("8GiB")
    plan = plan_of(outcomes, "grpo, vllm")
    assert plan.breakdown["vLLM"] == card.capacity_bytes // 4
    asleep = plan_of(outcomes, "grpo, vllm sleeps")
    assert asleep.moments["generation"].allocated_bytes > card_of("h100-80gb").capacity_bytes // 4
    assert asleep.moments["backward"].allocated_bytes < card_of("1GiB").capacity_bytes


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("no room", "nothing is left for the prompt"),
        ("groups", "must be divisible by num_generations"),
        ("no such flag", "neither plan nor GRPOConfig has an option --max_prompt_lenght"),
        ("evaluates", "an evaluation with --trainer grpo"),
    ],
)
def test_what_cannot_be_is_one_line(outcomes, name, line):
    assert line in str(outcomes[name])
    assert "\n" not in str(outcomes[name])


def test_a_length_that_is_typed_is_the_length_that_is_planned(outcomes):
    usual, typed = plan_of(outcomes, "as TRL cuts"), plan_of(outcomes, "a length")
    cut = plan_of(outcomes, "a length that is cut")
    lengths = [each.planned["length"] for each in (usual, typed, cut)]
    assert lengths == ["1024 tokens", "1500 tokens", "100 tokens"]
    assert cut.allocated_peak_bytes < usual.allocated_peak_bytes < typed.allocated_peak_bytes
    assert verdict(cut).endswith("; rows of 1500 tokens are cut at 100 (max_length)")
    assert "cut" not in verdict(typed)


def test_where_trl_loads_float32_the_first_change_is_another_dtype(outcomes):
    plan = plan_of(outcomes, "a base too large in float32")
    assert plan.planned["dtype"].startswith("float32 (TRL's default: see --dtype)")
    first = plan.proposals[0]
    assert (first.flags, first.in_the_run) == ("--dtype bfloat16", "--dtype bfloat16")


def test_the_rows_of_all_cards_are_shared_among_generations(outcomes):
    assert plan_of(outcomes, "eight cards").num_gpus == 8


@pytest.mark.all
def test_rows_are_cut_where_the_run_cuts_them(outcomes):
    plan = plan_of(outcomes, "cut")
    assert any("rows are cut at 32 tokens" in line for line in plan.assumptions)
    plan = plan_of(outcomes, "cut, though nobody said so")
    assert any("rows are cut at 512 tokens" in line for line in plan.assumptions)


@pytest.mark.all
@pytest.mark.parametrize(("name", "packing"), [("packed", True), ("whole", False)])
def test_rows_and_evaluations_are_those_of_a_trainer(outcomes, tmp_path, name, packing):
    """Two texts fill a packed row: a mask tells them apart, as in any run that packs."""
    num_tokens = 32 if packing else 64
    rows = Dataset.from_list([{"input_ids": [3] * num_tokens}] * 128)
    shape = {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 6, "do_eval": True}
    trl = pytest.importorskip("trl")
    args = trl.SFTConfig(str(tmp_path), bf16=False, packing=packing, max_length=64, **shape)
    model = LlamaForCausalLM(LlamaConfig(**tiny()))
    made = trl.SFTTrainer(model, args, None, rows, rows, processing_class=tokenizer())
    expected = plan_run(made, gpu="8GiB,sm_90", has_padding=True)
    found = plan_of(outcomes, name).moments
    assert {each: found[each].allocated_bytes for each in expected.moments} == {
        each: peak.allocated_bytes for each, peak in expected.moments.items()
    }
    assert any("rows are packed" in line for line in plan_of(outcomes, name).assumptions) is packing


def test_on_cuda_log_probabilities_have_one_gradient_for_all_rows(outcomes):
    """trl/kernels/logprob_entropy.py: torch's own operations make one a row, and stack them."""
    rows, length, vocabulary = 3 * 4, 64, 512  # chosen, rejected and reference
    made = [each for each in plan_of(outcomes, "tpo").top_tensors if each.moment == "backward"]
    shape = (rows, length - 1, vocabulary)
    assert ("aten::empty_like", shape) in [(each.operation, each.shape) for each in made]


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (("--trainer", "bco"), f"--trainer is one of {', '.join(TRL_TRAINERS)}, got 'bco'"),
        (("--vllm-utilization", "0.3"), "--vllm-utilization is for --trainer grpo, rloo or gmpo"),
        (("--trainer", "grpo", "--vllm-utilization", "3"), "a share of the card below 1, got 3"),
    ],
)
def test_a_wrong_flag_is_refused_at_once(tmp_path, flags, line):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    done = CliRunner().invoke(app, ["plan", "--model", str(tmp_path), *flags])
    assert done.exit_code == 2
    assert line in done.output
