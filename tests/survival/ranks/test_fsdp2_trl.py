"""TRL's trainers under FSDP2: gradients, and all that they log, are those of a run without a failure.

Launched as test_fsdp2.py does, with fsdp_ranks.py; `fail` says the same there. TRL takes its losses
in float32.
"""

from typing import Any

import pytest

from tests import rounding
from tests.survival.failing import LEARNING_RATE, TERMS
from tests.survival.ranks.test_fsdp2 import (
    IS_REFUSED,
    WHY_NOT,
    as_launched,
    launched,
    print_sweep,
    survived_exactly,
)
from tests.wanted import wanted

pytestmark = pytest.mark.slow
pytest.importorskip("trl")
if IS_REFUSED:
    pytest.skip(WHY_NOT, allow_module_level=True)

FAIL = {"1": {"0": [0.6]}, "0": {"3": [0.3]}}
"""On rank 1 in the backward pass of the first, on rank 0 in the forward pass of the last of four."""

BOTH = {"1": {"1": [0.9]}, "0": {"1": [0.1]}}
ALONE = {"gradient_accumulation_steps": 1, "steps": 3}
LORA: dict[str, Any] = {"lora": {}}
KL = {"beta": 0.1, "loss_type": "bnpo"}


def swept(rank: int, micro_batch: int, **more: Any) -> dict[str, Any]:
    return {"rank": rank, "micro_batch": micro_batch, "until": 0.9, **more}


EXACT: dict[str, dict[str, Any]] = {
    "SFT": {"trl": "sft", "fail": FAIL},
    "SFT, both at different points": {"trl": "sft", "fail": BOTH},
    "SFT, no accumulation": {"trl": "sft", "fail": {"1": {"0": [0.97], "2": [0.3]}}, "settings": ALONE},
    "SFT with an adapter": {"trl": "sft", "fail": FAIL, "settings": LORA},
    "SFT without padding": {"trl": "sft_packed", "fail": FAIL},
    "SFT, dynamic fine-tuning": {"trl": "sft", "fail": FAIL, "settings": {"loss_type": "dft"}},
    "SFT, one rank has one row": {"trl": "sft", "fail": {"0": {"0": [0.6]}}, "rows": [4, 1]},
    "SFT, nothing but checkpointing helps": {"trl": "sft", "fail": {"1": {"1": [0.5]}}, "rows": [1, 1]},
    "DPO": {"trl": "dpo", "fail": FAIL},
    "DPO with an adapter": {"trl": "dpo", "fail": FAIL, "settings": LORA},
    "DPO, precomputed": {"trl": "dpo", "fail": FAIL, "settings": {"precompute_ref_log_probs": True}},
    "Reward": {"trl": "reward", "fail": FAIL},
    "Reward with an adapter": {"trl": "reward", "fail": FAIL, "settings": LORA},
    "GRPO": {"trl": "grpo", "fail": FAIL},
    "GRPO with a reference": {"trl": "grpo", "fail": FAIL, "settings": KL},
    "GRPO with an adapter": {"trl": "grpo", "fail": FAIL, "settings": LORA},
    "RLOO": {"trl": "rloo", "fail": FAIL},
    "SFT, swept": {"trl": "sft", "sweep": swept(1, 0), "settings": {"steps": 30}},
    "SFT with an adapter, swept": {"trl": "sft", "sweep": swept(0, 1), "settings": {"steps": 30, **LORA}},
    "DPO, swept": {"trl": "dpo", "sweep": swept(0, 1), "settings": {"steps": 30}},
    "DPO with an adapter, swept": {"trl": "dpo", "sweep": swept(1, 1), "settings": {"steps": 30, **LORA}},
    "GRPO, swept": {"trl": "grpo", "sweep": swept(1, 1), "settings": {"steps": 20}},
    "SFT, swept again": {
        "trl": "sft",
        "sweep": swept(1, 0, until=6, **{"and": [200]}),
        "settings": {"steps": 20},
    },
}  # fmt: skip
OTHER: dict[str, dict[str, Any]] = {
    "nothing fails": {"trl": "sft"},
    "with dropout": {
        "trl": "sft",
        "fail": FAIL,
        "settings": {"lora": {"lora_dropout": 0.3}},
    },
}
WRAPPED = ("FSDPLlamaForCausalLM", "FSDPLlamaForSequenceClassification", "FSDPPeftModel")


@pytest.fixture(scope="module")
def two_ranks(request, tmp_path_factory):
    return launched(tmp_path_factory.mktemp("fsdp2_trl"), wanted(request, EXACT | OTHER), 2)


@pytest.mark.all
@pytest.mark.parametrize("name", EXACT)
def test_the_step_has_the_gradient_it_would_have_had(two_ranks, name: str, capsys) -> None:
    case = EXACT[name]
    steps = case.get("settings", {}).get("steps", 2)
    for facts in (seen[name] for seen in two_ranks):
        # TRL's second model gathers too
        as_launched(facts, 2, WRAPPED, 4 + 2 * (name == "DPO"))
        assert facts["num_steps"] == [steps, steps]
        assert len(facts["logged"]) >= 9
        assert facts["limit"] == two_ranks[0][name]["limit"]
    may = rounding.of_gradients(TERMS, [LEARNING_RATE] * steps)
    survived_exactly(two_ranks, name, case, may)
    print_sweep(capsys, f"FSDP2, {name}", case, two_ranks[0][name])


@pytest.mark.all
@pytest.mark.parametrize("name", ["nothing fails"])
def test_where_everything_fits_a_vote_precedes_each_exchange(two_ranks, name: str) -> None:
    for facts in (seen[name] for seen in two_ranks):
        assert (facts["gradients"], facts["logged_off_by"]) == (0.0, 0.0)
        assert facts["num_forwards"][0] == facts["num_forwards"][1] == 4
        assert facts["num_votes"] == 4 * (1 + 4) + 2, "SFT exchanges four numbers a micro-batch"


@pytest.mark.all
@pytest.mark.parametrize("name", ["with dropout"])
def test_dropout_draws_other_numbers_in_pieces(two_ranks, name: str) -> None:
    for facts in (seen[name] for seen in two_ranks):
        assert facts["ended"] == ""
        assert facts["num_survived"] > 0
        assert 1e-3 < facts["gradients"] < 1.5
        assert facts["gradients"] == two_ranks[0][name]["gradients"], "of whole gradients"
