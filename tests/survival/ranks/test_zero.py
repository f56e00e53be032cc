"""DeepSpeed's ZeRO on two ranks: divided by the plan a step has the same gradients, and what fails stops every rank."""

import json
import math
import sys
from pathlib import Path

import pytest

from tests import processes, rounding
from tests.distributed.launched import start
from tests.survival.failing import TERMS
from tests.wanted import wanted, write_wanted
from tests.written import read_findings

SCRIPT = Path(__file__).with_name("zero_plan.py")
LIMIT = 30
STAGES = {"zero1": 1, "zero2": 2, "zero3": 3}


@pytest.fixture(scope="module")
def ranks(request, tmp_path_factory):
    """Both, without a launcher that would end one when the other has failed.

    Their exit codes, and what they wrote.
    """
    folder = tmp_path_factory.mktemp("zero")
    write_wanted(folder, wanted(request, STAGES))
    variables = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": processes.free_port(),
    }
    both = [
        start(
            [sys.executable, SCRIPT, folder],
            folder / str(rank),
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            **variables,
        )
        for rank in (0, 1)
    ]
    codes = processes.end(*both)
    said = [(folder / str(rank) / "printed.txt").read_text() for rank in (0, 1)]
    assert (folder / "rank-0.json").is_file(), said[0][-3000:]
    return (
        folder,
        codes,
        said,
        [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in (0, 1)],
    )


@pytest.mark.all(unless=lambda name: name == "zero3")
@pytest.mark.parametrize("name", STAGES)
def test_a_plan_has_the_gradients_of_the_whole(ranks, name: str) -> None:
    *_, (first, second) = ranks
    for facts in (first[name], second[name]):
        assert (facts["world_size"], facts["backend"], facts["wrapped"]) == (
            2,
            "gloo",
            "DeepSpeedEngine",
        )
        assert facts["stage"] == STAGES[name]
        assert facts["offloaded"] == (name == "zero3")
        assert (facts["num_elsewhere"] > 0) == (facts["stage"] == 3)
        assert facts["gradients"] <= 1, "of what rounding to float32 may do"
        assert facts["weights"] <= 1
        assert facts["counters"][0] == facts["counters"][1]
        for ours, theirs in (facts["norms"], facts["losses"]):
            assert len(theirs) == 4
            assert ours == pytest.approx(theirs, rel=rounding.of_a_mean(TERMS, num_values=64))


@pytest.mark.all(unless=lambda name: name == "zero3")
@pytest.mark.parametrize("name", STAGES)
def test_it_changes_nothing_where_everything_fits(ranks, name: str) -> None:
    *_, both = ranks
    for facts in (one[name] for one in both):
        assert facts["attached"] == [0, 0]
        micro_batches, pieces = facts["whole_pieces"]
        assert pieces == [[micro_batch] for micro_batch in micro_batches]


@pytest.mark.all(unless=lambda name: name == "zero3")
@pytest.mark.parametrize("name", STAGES)
def test_it_is_rehearsed_together_and_leaves_no_trace(ranks, name: str) -> None:
    """On cards of 70 and of 50 tokens, 10 of them taken: of the longest batch, 4 x 16 tokens, 2 rows will fit."""
    *_, (first, second) = ranks
    for facts in (first[name], second[name]):
        assert facts["limit"] == 2 * 16
        assert max(facts["rehearsed"]) <= 1, "of what rounding to float32 may do"
    assert [len(one) for one in first[name]["rehearsed_pieces"]] == [
        len(one) for one in second[name]["rehearsed_pieces"]
    ]
    assert (
        max(rows * length for pieces in first[name]["rehearsed_pieces"] for rows, length in pieces)
        <= 32
    )


@pytest.mark.all(unless=lambda name: name == "zero3")
@pytest.mark.parametrize("name", STAGES)
def test_both_ranks_divide_alike(ranks, name: str) -> None:
    *_, both = ranks
    micro_batches = list(zip(*(facts[name]["micro_batches"] for facts in both), strict=True))
    pieces = list(zip(*(facts[name]["pieces"] for facts in both), strict=True))
    needed = [[pieces_of(*shape) for shape in shapes] for shapes in micro_batches]
    assert [[len(one) for one in two] for two in pieces] == [[max(two)] * 2 for two in needed]
    assert any(one != other for one, other in needed), (
        "one rank is divided because the other has to be"
    )
    assert any(
        rows < max(two)
        for two, shapes in zip(needed, micro_batches, strict=True)
        for rows, _ in shapes
    )


def test_a_rank_that_has_it_alone_waits_for_nobody(ranks) -> None:
    _, _, said, facts = ranks
    assert "of 2 ranks these do not take part: 1; give every rank the same callbacks" in said[0]
    assert "do not take part" not in said[1]
    for seen in facts:
        assert seen["on one rank"]["steps"] == 4
        assert set(seen["on one rank"]["pieces"]) == {1}
        assert max(seen["flattened"]["pieces"]) > 1, "with it on both ranks they are divided"


def pieces_of(rows: int, length: int) -> int:
    return math.ceil(rows / max(1, LIMIT // length)) if rows * length > LIMIT else 1


def test_one_sequence_where_another_rank_divides_is_computed_as_it_is(ranks) -> None:
    """It lies otherwise than what was measured together: nothing is measured by one rank alone."""
    *_, both = ranks
    for facts in (one["flattened"] for one in both):
        assert facts["gradients"] <= 1, "of what rounding to float32 may do"
        assert facts["pieces"] == both[0]["flattened"]["pieces"]
        assert max(facts["pieces"]) > 1


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("no ZeRO", "DeepSpeed without ZeRO (stage 0) is not supported"),
        ("NVMe", "offload_param to NVMe is not supported"),
        ("ZeRO++", "ZeRO++ (zero_hpz_partition_size, zero_quantized_*) is not supported"),
    ],
)
def test_what_is_not_tried_is_refused_by_name(ranks, name: str, why: str) -> None:
    *_, (first, second) = ranks
    assert first["refused"][name] == second["refused"][name]
    assert why in first["refused"][name]


def test_what_fails_all_the_same_stops_every_rank(ranks) -> None:
    folder, codes, said, _ = ranks
    checkpoint = folder / "failing" / "checkpoint-2"
    why = f"so all ranks stop, after step 2. The last checkpoint is {checkpoint}"

    assert (
        (folder / "said.txt")
        .read_text()
        .startswith("CUDA out of memory. Tried to allocate 2.00 MiB for number 300")
    )
    assert why in (folder / "said.txt").read_text()
    assert codes == [1, 1]
    assert said[0].count("rank 0 stops") == 1
    assert (
        f"rank 0 stops, because rank 1 cannot continue: a backward pass of ZeRO cannot be repeated, {why}"
        in said[0]
    )
    (finding,) = read_findings(folder / "failing", rank=1)
    assert finding.code == "out-of-memory-refused"
