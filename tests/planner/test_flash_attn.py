"""A plan with the package flash-attn: what its source makes, and what other ways to its kernel take."""

import pytest
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from tests.planner.test_plans import ADAM, request
from tests.processes import ENDS_A_HANG
from trainer_plugins import MemoryPlan, plan_run
from trainer_plugins.planner import NotPredicted, PlanError
from trainer_plugins.planner.predict import predict_all
from trainer_plugins.units import MIB

pytestmark = [
    pytest.mark.all,
    pytest.mark.skipif(
        transformers.__version__.startswith("4."), reason="refused with transformers 4"
    ),
]

HEADS, SIZE, LENGTH = 16, 64, 2048
SMALL = {
    "model_type": "llama",
    "hidden_size": HEADS * SIZE,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 4,
    "vocab_size": 64,
    "max_position_embeddings": LENGTH,
}
FLASH = {**SMALL, "attn_implementation": "flash_attention_2"}
CHECKPOINTING = ("--gradient_checkpointing", "True")

REQUESTS = {
    **{
        f"{name}, {rows}": request(config, *ADAM, *CHECKPOINTING, rows=rows, sequence_length=LENGTH)
        for name, config in (("sdpa", SMALL), ("flash", FLASH))
        for rows in (1, 4)
    },
    "sdpa, padded": request(SMALL, *ADAM, rows=4, sequence_length=LENGTH, padded=True),
    "flash, padded": request(FLASH, *ADAM, rows=4, sequence_length=LENGTH, padded=True),
    "flash, whole": request(FLASH, *ADAM, rows=4, sequence_length=LENGTH),
    "odd heads": request({**FLASH, "head_dim": 20}, *ADAM, sequence_length=LENGTH),
    "t4": request(FLASH, *ADAM, gpu="t4", sequence_length=LENGTH),
    "float32": request(FLASH, *ADAM, dtype="float32", sequence_length=LENGTH),
    "autocast": request(FLASH, *ADAM, "--bf16", "True", dtype="float32", sequence_length=LENGTH),
    "3": request({**SMALL, "attn_implementation": "flash_attention_3"}),
}


@pytest.fixture(scope="module")
def outcomes() -> dict[str, MemoryPlan | PlanError]:
    return dict(zip(REQUESTS, predict_all([*REQUESTS.values()], ENDS_A_HANG), strict=True))


@pytest.mark.parametrize("rows", [1, 4])
def test_whole_rows_take_what_torchs_own_flash_kernel_takes(outcomes, rows: int) -> None:
    """It is FlashAttention 2 too: aten/src/ATen/native/transformers/cuda/flash_attn."""
    package, torchs = outcomes[f"flash, {rows}"], outcomes[f"sdpa, {rows}"]

    assert package.moment == torchs.moment == "backward"
    assert package.allocated_peak_bytes == pytest.approx(torchs.allocated_peak_bytes, rel=1e-3)
    assert package.reserved_peak_bytes == pytest.approx(torchs.reserved_peak_bytes, rel=0.01)


def test_with_padding_the_tokens_are_gathered_and_no_mask_of_pairs_is_made(outcomes) -> None:
    padded, whole = outcomes["flash, padded"], outcomes["flash, whole"]

    # each layer keeps its output twice: without padding for the kernel, with it for what follows
    kept = 2 * 4 * LENGTH * SIZE * HEADS * 2
    ends = [each.moments["forward"].allocated_bytes for each in (whole, padded)]
    assert ends[1] - ends[0] == pytest.approx(kept, rel=0.01)
    mask = 4 * LENGTH * LENGTH * 2  # sdpa adds one of the dtype of the scores to each layer
    assert outcomes["sdpa, padded"].allocated_peak_bytes > whole.allocated_peak_bytes + mask


def test_heads_are_filled_up_to_multiples_of_eight(outcomes) -> None:
    plan = outcomes["odd heads"]

    assert isinstance(plan, MemoryPlan), plan


def test_autocast_reaches_the_kernel(outcomes) -> None:
    assert isinstance(outcomes["autocast"], MemoryPlan), outcomes["autocast"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("t4", "FlashAttention only supports Ampere GPUs or newer"),
        ("float32", "FlashAttention only support fp16 and bf16 data type"),
        ("3", "not predicted: attention of the package flash-attn"),
    ],
)
def test_what_a_card_refuses_is_refused_in_its_words(outcomes, name: str, words: str) -> None:
    assert isinstance(outcomes[name], PlanError)
    assert words in str(outcomes[name])
    assert isinstance(outcomes[name], NotPredicted) is (name == "3")


def packed(num_sequences: int) -> MemoryPlan:
    """Plan a Trainer whose rows hold so many sequences, told apart by position ids alone."""
    model = LlamaForCausalLM(LlamaConfig(**SMALL)).bfloat16()
    model.config._attn_implementation = "flash_attention_2"  # as on a machine that has the package
    tokens = torch.randint(1, 64, (LENGTH,))
    positions = torch.arange(LENGTH) % (LENGTH // num_sequences)
    row = {"input_ids": tokens, "labels": tokens, "position_ids": positions}
    args = TrainingArguments(
        per_device_train_batch_size=1, report_to="none", optim="adamw_torch_fused"
    )
    return plan_run(Trainer(model=model, args=args, train_dataset=[row] * 4), gpu="a100-80gb")


def test_each_packed_sequence_has_a_block_of_its_own_in_the_backward() -> None:
    """flash_api.cpp, mha_varlen_bwd: total_q + 128 * batch_size rows of dq_accum and softmax_d."""
    few, many = packed(256), packed(512)
    more = 4 * 128 * 256 * HEADS * (SIZE + 1)

    assert few.moment == many.moment == "backward"
    assert many.allocated_peak_bytes - few.allocated_peak_bytes == pytest.approx(more, abs=MIB)
