"""FSDP2: whichever rank runs out of memory, wherever in a window, the step has the gradient it would have had.

Each case is a training of its own, in float64; all of them run in one launch of two ranks
(fsdp_ranks.py), as the processes cost more than the trainings. `fail` says for a rank and a
micro-batch at which parts of its allocations the memory ends: below about 0.5 in the forward pass,
beyond 1 in what is computed after a failure.
"""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.launched import command, ended, start
from tests.models import checkpointing
from tests.wanted import wanted

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("fsdp_ranks.py")

WINDOW = {"gradient_accumulation_steps": 3}
EVALUATED = {"steps": 3, "eval_strategy": "steps", "eval_steps": 1}
SAVED = {"steps": 4, "save_strategy": "steps", "save_steps": 2}
LATE_AND_EARLY = {"1": {"0": [0.6]}, "0": {"5": [0.3]}}
"""On rank 1 in the backward pass of the first, on rank 0 in the forward pass of the last micro-batch of two windows."""

EXACT: dict[str, dict[str, Any]] = {
    "in forward": {"fail": {"1": {"1": [0.2]}}},
    "in backward, at 55 %": {"fail": {"1": {"1": [0.55]}}},
    "in backward, at 75 %": {"fail": {"0": {"1": [0.75]}}},
    "in backward, at 97 %": {"fail": {"1": {"1": [0.97]}}},
    "in the last allocation": {"fail": {"1": {"1": [1.0]}}},
    "in a micro-batch that is not reduced": {"fail": {"1": {"1": [0.75]}}, "settings": WINDOW},
    "both, at different points": {"fail": {"1": {"1": [0.9]}, "0": {"1": [0.1]}}},
    "twice in a window": {"fail": {"1": {"0": [0.6]}, "0": {"2": [0.5]}}, "settings": WINDOW},
    "again while it is computed again": {"fail": {"1": {"1": [0.6, 4.6]}}, "settings": WINDOW},
    "a reduction each micro-batch": {
        "fail": LATE_AND_EARLY,
        "settings": WINDOW,
        "sync_each_batch": True,
    },
    "weights stay gathered": {
        "fail": LATE_AND_EARLY,
        "settings": WINDOW,
        "reshard_after_forward": "false",
    },
    "checkpointing": {
        "fail": LATE_AND_EARLY,
        "settings": {**WINDOW, **checkpointing(reentrant=False)},
    },
    "reentrant checkpointing": {
        "fail": LATE_AND_EARLY,
        "settings": {**WINDOW, **checkpointing(reentrant=True)},
    },
    "tied weights": {
        "fail": LATE_AND_EARLY,
        "settings": WINDOW,
        "config": {"tie_word_embeddings": True},
    },
    "adapters": {"fail": LATE_AND_EARLY, "settings": WINDOW, "lora": True},
    "tokens averaged by rank": {
        "fail": LATE_AND_EARLY,
        "settings": {**WINDOW, "average_tokens_across_devices": False},
    },
    "one rank has one row": {"fail": LATE_AND_EARLY, "settings": WINDOW, "rows": [1, 4]},
    "measured again where windows begin with one row": {
        "fail": {"1": {"1": [0.5]}},
        "settings": {"gradient_accumulation_steps": 2, "steps": 4},
        "rows_in_turn": [1, 4],
        "sparing": 0,
    },
    "after an evaluation": {"fail": {"1": {"2": [0.6]}, "0": {"4": [0.2]}}, "settings": EVALUATED},
    "nothing but checkpointing helps": {"fail": {"1": {"1": [0.5]}}, "rows": [1, 1]},
    "each rank has a folder of its own": {
        "fail": LATE_AND_EARLY,
        "settings": WINDOW,
        "own_folders": True,
    },
    "saved": {"fail": {"1": {"1": [0.5]}}, "settings": SAVED},
    "resumed": {"resume": True, "settings": SAVED},
    "swept, not reduced": {"sweep": {"rank": 1, "micro_batch": 0}, "settings": {"steps": 4}},
    "swept, reduced": {"sweep": {"rank": 0, "micro_batch": 1}, "settings": {"steps": 4}},
    # A second error, after the first: in what is owed, in throwing away, in measuring, in computing
    # again.
    "swept again": {
        "sweep": {"rank": 1, "micro_batch": 0, "and": [200], "until": 6},
        "settings": {"steps": 4},
    },
}
OTHER: dict[str, dict[str, Any]] = {
    "nothing fails": {"settings": WINDOW},
    "in mixed precision": {"fail": LATE_AND_EARLY, "settings": WINDOW, "mixed": True},
    "rehearsed": {"card": [100, 70], "settings": {"per_device_train_batch_size": 8}},
    "rehearsed, with no room to measure": {
        "card": [100, 20],
        "settings": {"per_device_train_batch_size": 8},
    },
    "a limit between two numbers": {"limit": [63.5, 61.5], "settings": WINDOW},
    "as torch says": {"fail": {"1": {"0": [0.75], "4": [0.9]}}, "settings": WINDOW, "naive": True},
    "not as torch says": {"fail": {"1": {"0": [0.75], "4": [0.9]}}, "settings": WINDOW},
    "coupled in training": {
        "fail": {"1": {"1": [0.5]}},
        "own_norm": True,
        "config": {"attention_dropout": 0.1},
        "options": {"ladder": []},
    },
    "coupled in training, reentrant": {
        "fail": {"0": {"1": [0.5]}},
        "own_norm": True,
        "settings": checkpointing(reentrant=True),
        "options": {"ladder": []},
    },
    "on rank 0 alone": {"on": [0], "settings": WINDOW},
    "on rank 1 alone": {"on": [1], "settings": WINDOW},
    "on both again": {"settings": WINDOW},
    "late": {"late": True},
    "nothing helps": {"fail": {"1": {"1": [0.5]}}, "rows": [1, 1], "options": {"ladder": []}},
    "torch 2.12": {
        "refused_as": "no reset_iter_state: use 2.13 or newer",
        "without": "reset_iter_state",
    },
    # The last: it ends both ranks. Not even a short example fits.
    "one rank cannot go on": {"fail": {"1": {"1": [0.5]}}, "again": 4},
}
REFUSED = [name for name, case in OTHER.items() if "refused_as" in case]
SOME = (
    "in a micro-batch that is not reduced",
    "adapters",
    "nothing but checkpointing helps",
)
ALWAYS = (
    "on rank 0 alone",
    "on rank 1 alone",
    "on both again",
    "one rank cannot go on",
)


def launched(
    folder: Path, cases: dict[str, dict[str, Any]], num_ranks: int, config: str | Path = "fsdp2"
) -> list[dict[str, Any]]:
    """Run the cases on so many ranks.

    Returns what each rank has seen, by case, and how the launch ended.
    """
    (folder / "cases.json").write_text(json.dumps(cases))
    call = [*command(config, ("--num_processes", str(num_ranks)), SCRIPT), str(folder)]
    began = time.monotonic()
    process = start(call, folder)
    printed = ended(process, folder)
    facts = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(num_ranks)]
    assert all(list(seen) == list(cases)[: len(seen)] for seen in facts)
    missing = set(cases) - set(facts[-1])
    assert not missing, f"{missing}\n{printed[-5000:]}"
    return [
        {**seen, "code": process.returncode, "printed": printed, "s": time.monotonic() - began}
        for seen in facts
    ]


IS_REFUSED = tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 13)
WHY_NOT = "FSDP2 has no reset_iter_state before torch 2.13: refused by name"


@pytest.fixture(scope="module")
def two_ranks(request, tmp_path_factory):
    if IS_REFUSED:
        pytest.skip(WHY_NOT)
    cases = wanted(request, EXACT | OTHER, also=ALWAYS)
    return launched(tmp_path_factory.mktemp("fsdp2"), cases, 2)


@pytest.fixture(scope="module")
def two_refused(request, tmp_path_factory):
    """Before torch 2.13 what is refused is all there is to launch."""
    if not IS_REFUSED:
        return request.getfixturevalue("two_ranks")
    return launched(tmp_path_factory.mktemp("fsdp2"), {name: OTHER[name] for name in REFUSED}, 2)


def as_launched(
    facts: dict[str, Any],
    world_size: int,
    wrapped: tuple[str, ...] = ("FSDPLlamaForCausalLM", "FSDPPeftModel"),
    num_gathers: int = 5,
) -> None:
    assert facts["wrapped"] in wrapped
    assert (facts["world_size"], facts["backend"]) == (world_size, "gloo")
    assert facts["num_gathers"] >= num_gathers
    assert facts["restored"] == ["DefaultAllGather", "DefaultReduceScatter"]


@pytest.mark.all(unless=lambda name: name in SOME)
@pytest.mark.parametrize("name", EXACT)
def test_the_step_has_the_gradient_it_would_have_had(two_ranks, name: str, capsys) -> None:
    case = EXACT[name]
    for facts in (seen[name] for seen in two_ranks):
        as_launched(facts, 2)
    survived_exactly(two_ranks, name, case)
    print_sweep(capsys, f"FSDP2, {name}", case, two_ranks[0][name])


def print_sweep(capsys, name: str, case: dict[str, Any], facts: dict[str, Any]) -> None:
    if "sweep" in case:
        with capsys.disabled():
            print(f"\n  {name}: gradients off by {facts['gradients']:.1e} at most")


def survived_exactly(
    ranks: list[dict[str, Any]], name: str, case: dict[str, Any], may: float = 1e-12
) -> None:
    for rank, facts in enumerate(seen[name] for seen in ranks):
        assert facts["ended"] == ""
        assert facts["num_steps"][0] == facts["num_steps"][1] - 2 * ("resume" in case)
        assert facts["gradients"] <= may
        assert facts["weights"] <= may or "trl" in case
        assert facts["logged_off_by"] <= 2e-6, "losses of transformers are taken in float32"
        assert facts["num_failed"] == facts["num_to_fail"]
        assert (facts["num_to_fail"] > 0) == (
            str(rank) in case.get("fail", {}) or case.get("sweep", {}).get("rank") == rank
        )
        assert facts["num_survived"] > 0
        assert facts["num_forwards"][0] > facts["num_forwards"][1] - 4 * ("resume" in case)


@pytest.mark.all
@pytest.mark.parametrize(
    ("helped", "saved", "resumed"), [("nothing but checkpointing helps", "saved", "resumed")]
)
def test_a_limit_is_that_of_all_ranks(two_ranks, helped, saved, resumed) -> None:
    for name in EXACT.keys() & two_ranks[0]:
        assert two_ranks[0][name]["limit"] == two_ranks[1][name]["limit"], name
    assert two_ranks[0][helped]["checkpointing"] == ["checkpointing"]
    assert two_ranks[1][helped]["checkpointing"] == ["checkpointing"]
    assert two_ranks[0][resumed]["limit"] == two_ranks[0][saved]["limit"] < 64


@pytest.mark.parametrize("name", ["nothing fails"])
def test_where_everything_fits_it_is_one_vote_a_micro_batch(two_ranks, name: str) -> None:
    for seen in two_ranks:
        facts = seen[name]
        assert (facts["gradients"], facts["weights"], facts["num_survived"]) == (0.0, 0.0, 0)
        assert facts["num_forwards"][0] == facts["num_forwards"][1] == 6
        assert facts["num_votes"] == 6 + 2, (
            "and at the start one whether to rehearse, and one for the limit"
        )


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_has_it_alone_waits_for_nobody(two_ranks, rank: int) -> None:
    here = two_ranks[rank][f"on rank {rank} alone"]
    there = two_ranks[1 - rank][f"on rank {rank} alone"]
    assert f"of 2 ranks these do not take part: {1 - rank}; give every" in "".join(here["said"])
    assert there["said"] == []
    for seen in (here, there):
        assert (seen["wrapped"], seen["ended"]) == ("FSDPLlamaForCausalLM", "")
        assert (seen["num_votes"], seen["gradients"]) == (0, 0.0)
        assert seen["num_forwards"][0] == seen["num_forwards"][1] == 6
    for seen in two_ranks:  # and it was not too late for the next training
        assert seen["on both again"]["num_votes"] == 6 + 2


@pytest.mark.parametrize("name", ["late"])
def test_a_rank_that_comes_late_takes_part(two_ranks, name: str) -> None:
    for seen in two_ranks:
        assert seen[name]["missing"] == ""
        assert "these do not take part: 0, 1" in seen[name]["missing when all have left"]


@pytest.mark.parametrize("name", ["rehearsed"])
def test_what_is_rehearsed_together_does_not_fail(two_ranks, name: str) -> None:
    for seen in two_ranks:
        facts = seen[name]
        assert (facts["ended"], facts["num_survived"]) == ("", 0)
        assert facts["limit"] == 4 * 16, "five rows of 16 tokens do not fit on the smaller card"
        assert facts["num_forwards"][0] > 2 * facts["num_forwards"][1]
        assert facts["gradients"] <= 1e-12
        assert facts["weights"] <= 1e-12


@pytest.mark.all
@pytest.mark.parametrize("name", ["a limit between two numbers"])
def test_an_agreed_limit_is_rounded_down(two_ranks, name: str) -> None:
    """62 tokens were never seen to fit."""
    for seen in two_ranks:
        facts = seen[name]
        assert (facts["ended"], facts["limit"]) == ("", 61)
        assert facts["num_forwards"][0] > facts["num_forwards"][1], "64 tokens are divided"
        assert facts["gradients"] <= 1e-12


@pytest.mark.all
@pytest.mark.parametrize("name", ["rehearsed, with no room to measure"])
def test_a_limit_by_which_nothing_can_be_divided_is_given_up_together(two_ranks, name: str) -> None:
    here, there = (seen[name]["ended"] for seen in reversed(two_ranks))
    assert "there was not enough memory to measure whether its loss can be divided" in here
    assert (
        "there was not enough memory to measure whether its loss can be divided (another rank ran out of memory)"
        in there
    )


@pytest.mark.all
@pytest.mark.parametrize("name", ["in mixed precision"])
def test_gradients_kept_in_another_precision(two_ranks, name: str) -> None:
    for seen in two_ranks:
        assert seen[name]["num_survived"] > 0
        assert seen[name]["gradients"] <= 1e-5


@pytest.mark.all
@pytest.mark.parametrize(("naive", "ours"), [("as torch says", "not as torch says")])
def test_what_torch_documents_is_not_enough(two_ranks, naive: str, ours: str) -> None:
    """`reset_iter_state` and `zero_grad` leave what was not reduced yet, and it is added to the next step."""
    for seen in two_ranks:
        assert seen[naive]["gradients"] > 1e-2
        assert seen[ours]["gradients"] <= 1e-12


@pytest.mark.all(unless=lambda name: name == "coupled in training")
@pytest.mark.parametrize("name", ["coupled in training", "coupled in training, reentrant"])
def test_what_couples_rows_in_training_alone_is_found_on_all_ranks(two_ranks, name: str) -> None:
    for seen in two_ranks:
        assert "its gradient is not the sum over its parts: measured on" in seen[name]["ended"]
        assert "in training mode, it is off by" in seen[name]["ended"]
    assert "2 of its rows (1 + 1)" in two_ranks["reentrant" not in name][name]["ended"]


@pytest.mark.parametrize("name", ["nothing helps"])
def test_all_ranks_give_up_together_each_with_its_reason(two_ranks, name: str) -> None:
    here, there = (seen[name]["ended"] for seen in reversed(two_ranks))
    assert here.startswith(
        "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 MiB for number"
    )
    assert "there is nothing smaller to try than 1 row" in here
    assert there.startswith("OutOfMemoryError: another rank ran out of memory")
    assert "another rank has nothing smaller to try" in there


def test_a_rank_that_cannot_go_on_ends_and_so_do_the_others(two_ranks) -> None:
    assert two_ranks[1]["code"] != 0
    assert "rank 1 ended: OutOfMemoryError: CUDA out of memory" in two_ranks[1]["printed"]
    assert "survive_oom could not help: not one short example fits" in two_ranks[1]["printed"]


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(two_refused, name: str) -> None:
    for seen in two_refused:
        assert OTHER[name]["refused_as"] in seen[name]["refused"]


@pytest.mark.all
@pytest.mark.skipif(IS_REFUSED, reason=WHY_NOT)
def test_three_ranks(tmp_path) -> None:
    fail = {"1": {"1": [0.6]}, "2": {"1": [0.2], "5": [0.9]}}
    for seen in launched(
        tmp_path, {"three": {"fail": fail, "settings": WINDOW, "rows": [1, 4, 2]}}, 3
    ):
        assert seen["code"] == 0
        as_launched(seen["three"], 3)
        assert seen["three"]["num_survived"] == 2
        assert seen["three"]["gradients"] <= 1e-12
        assert seen["three"]["weights"] <= 1e-12
