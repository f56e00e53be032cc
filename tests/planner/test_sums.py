"""What autograd adds up in place is in place on every rank too, however many modes a plan has in force there."""

import json
import pickle
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.published import published
from tests import processes
from tests.distributed.launched import ROOT, environment
from tests.planner.several import IS_TOO_OLD, WHY_NOT
from tests.planner.test_plans import request, tiny
from trainer_plugins import MemoryPlan
from trainer_plugins.launch.configs import path
from trainer_plugins.planner.predict import predict_all
from trainer_plugins.planner.request import PlanRequest

pytestmark = pytest.mark.skipif(IS_TOO_OLD, reason=WHY_NOT)

TIED: dict[str, Any] = {"vocab_size": 20000, "hidden_size": 256, "tie_word_embeddings": True}
QUIET = ("--save_strategy", "no", "--bf16", "True")


def asked(
    num_gpus: int, launch_file: str | None = None, dtype: str = "float32", **fields: Any
) -> PlanRequest:
    run = request(
        tiny(**fields), "--optim", "sgd", *QUIET, num_gpus=num_gpus, dtype=dtype, sequence_length=64
    )
    return replace(run, launch_file=str(path(launch_file)) if launch_file is not None else None)


REQUESTS = {
    "one": asked(1),
    "one, bf16": asked(1, dtype="bfloat16"),
    "ddp": asked(2),
    "fsdp2": asked(2, "fsdp2"),
    "zero2": asked(2, "zero2"),
    "one, tied": asked(1, **TIED),
    "ddp, tied": asked(2, **TIED),
}


@pytest.fixture(scope="module")
def traced(tmp_path_factory) -> dict[str, tuple[dict, list[int]]]:
    """For each run its plan, and the bytes of the sums that its backward made anew."""
    folder: Path = tmp_path_factory.mktemp("sums")
    (folder / "requests").write_bytes(pickle.dumps([*REQUESTS.values()]))
    call = [
        sys.executable,
        "-m",
        "tests.planner.traced",
        str(folder / "requests"),
        str(folder / "results"),
    ]
    done = processes.run(call, cwd=ROOT, environ=environment(DS_ACCELERATOR="cuda"))
    assert done.returncode == 0, done.stderr
    plans = [result["plan"] for result in json.loads((folder / "results").read_text())]
    sums = json.loads((folder / "results.sums").read_text())
    return dict(zip(REQUESTS, zip(plans, sums, strict=True), strict=True))


@pytest.mark.parametrize(
    ("ranks", "alone"),
    [("ddp", "one"), ("fsdp2", "one, bf16"), ("zero2", "one, bf16"), ("ddp, tied", "one, tied")],
)
def test_ranks_make_no_more_sums_than_one_card(traced, ranks, alone):
    """Each case beside one card that computes in the same dtypes; in float32 there are none."""
    assert traced[ranks][1] == traced[alone][1]
    assert bool(traced[ranks][1]) == alone.endswith("bf16")


def test_gradients_of_tied_weights_are_added_in_place_under_ddp(traced):
    """That sum is the peak here: the gradients of the head and of the embeddings, cast from bf16, and no third."""
    ddp, alone = traced["ddp, tied"][0], traced["one, tied"][0]
    assert (ddp["moment"], alone["moment"]) == ("backward", "backward")
    buckets = ddp["breakdown"]["sharding buffers"]
    assert ddp["allocated_peak_bytes"] - buckets == pytest.approx(
        alone["allocated_peak_bytes"], abs=4096
    )


@pytest.mark.all
@pytest.mark.slow
def test_fsdp2_on_eight_h100_is_what_a_benchmark_of_accelerate_saw():
    """Sampled every 10 ms, which does not see the sum of the tied gradients: one operation, after which they are freed.

    It is made anew, in torch too: in one dtype the gradient of a linear layer is a view, which
    nothing is added to.
    """
    flags = (*QUIET, "--max_grad_norm", "0")
    run = request("qwen2.5-1.5b", *flags, rows=2, num_gpus=8, dtype="float32", sequence_length=128)
    (plan,) = predict_all([replace(run, launch_file=str(path("fsdp2")))])
    assert isinstance(plan, MemoryPlan), plan
    assert plan.moment == "backward"
    low, high = (
        row.measured["sampled"] for row in published() if row.source == "accelerate FSDP2 benchmark"
    )
    tied = 2 * 151936 * 1536
    assert 0.99 * low < plan.allocated_peak_bytes - tied < 1.01 * high
