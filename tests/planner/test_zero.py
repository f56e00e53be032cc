"""ZeRO: the planner's engine does what DeepSpeed's engine does on two real ranks, call by call, and byte by byte."""

import itertools
import sys
from pathlib import Path

import pytest
import torch

from tests import processes
from tests.distributed.launched import environment
from tests.planner.several import IS_TOO_OLD, WHY_NOT, two_ranks_and_the_planner
from tests.planner.zero_stream import CASES, NUM_STEPS
from tests.wanted import wanted, write_wanted
from trainer_plugins.planner.plan import NotPredicted, PlanError
from trainer_plugins.planner.sharded.zero_config import refuse_config
from trainer_plugins.planner.tracing.host_tensors import HostMemory

SCRIPT = Path(__file__).with_name("zero_stream.py")
if IS_TOO_OLD:
    pytest.skip(WHY_NOT, allow_module_level=True)

SMALL_TENSORS = 64
"""Bytes of a loss, a norm, a scale, which one has moved to the card and the other has there already."""

ALWAYS = ("3, checkpointing", "2")


@pytest.fixture(scope="module")
def both(request, tmp_path_factory):
    """What rank 0 of two did, and what the planner did, by the name of the case."""
    folder = tmp_path_factory.mktemp("zero")
    write_wanted(folder, wanted(request, CASES, also=ALWAYS))
    first, _, planner = two_ranks_and_the_planner(SCRIPT, folder)
    return first, planner


SENT = """
import json, os, sys
from dataclasses import replace
from pathlib import Path
from tests.planner.test_plans import request, tiny
from trainer_plugins.planner.rehearse.watch import watch
from trainer_plugins.planner.tracing.events import ALLOC

on_host = {"device": "cpu"}
zero = {"stage": 3, "offload_param": on_host, "offload_optimizer": on_host}
zero |= {"stage3_prefetch_bucket_size": "auto", "stage3_max_live_parameters": 200_000}
zero |= {"stage3_max_reuse_distance": 200_000, "stage3_param_persistence_threshold": "auto"}
given = dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu"), "auto")
given |= {"gradient_accumulation_steps": "auto", "bf16": {"enabled": "auto"}}
Path(sys.argv[2]).write_text(json.dumps({"zero_optimization": zero, **given}))
asked = request(
    tiny(num_hidden_layers=4),
    *("--bf16", "True", "--gradient_checkpointing", "True", "--deepspeed", sys.argv[2]),
    num_gpus=4,
    sequence_length=64,
    dtype="bfloat16",
)
trainer = sys.argv[1] if sys.argv[1] != "Trainer" else None
trace = watch(replace(asked, source=replace(asked.source, trainer=trainer))).trace
sent, most, kept, before = set(), 0, 0, ""
for event in trace.events:
    if (before, event.moment) == ("forward", "backward"):
        kept = len(sent)
    before, made = event.moment, trace.storages[event.number]
    if made.operation == "aten::_to_copy" and made.stream:
        (sent.add if event.kind == ALLOC else sent.discard)(event.number)
    most = max(most, len(sent))
print(most, kept, flush=True)
os._exit(0)
"""


@pytest.mark.all
@pytest.mark.parametrize(("trainer", "most", "kept"), [("Trainer", 23, 15), ("sft", 21, 0)])
def test_what_is_sent_from_main_memory_stays_until_someone_waits(trainer, most, kept, tmp_path):
    """More than half is for the backward pass; but TRL gathers its metrics before that."""
    call = [sys.executable, "-c", SENT, trainer, str(tmp_path / "zero.json")]
    environ = environment(DS_ACCELERATOR="cuda")
    assert processes.run(call, check=True, environ=environ).stdout.split()[-2:] == [
        str(most),
        str(kept),
    ]


@pytest.mark.all(unless=lambda name: name in ALWAYS)
@pytest.mark.parametrize("name", CASES)
def test_the_stream_of_collectives_and_releases_is_the_engines(both, name):
    ranks, planner = (each[name] for each in both)
    assert (ranks["world_size"], ranks["num_steps"]) == (2, NUM_STEPS)
    assert (planner["world_size"], planner["num_steps"]) == (2, NUM_STEPS)
    assert len(ranks["stream"]) > 50
    if CASES[name]["zero"]["stage"] == 3:
        assert {"reduce_scatter_fn", "all_gather_into_tensor", "release"} <= {
            call[0] for call in ranks["stream"]
        }
    assert in_order(planner["stream"]) == in_order(ranks["stream"])


def in_order(stream):
    """Calls of one kind in a row are sorted: the engine keeps weights in sets, whose order is that of addresses.

    The ranks also compare the order of their modules, in int64, which one rank alone has no need
    of.
    """
    kept = [call for call in stream if call[-1] != "torch.int64"]
    return [
        sorted(calls, key=str) for _, calls in itertools.groupby(kept, key=lambda call: call[0])
    ]


@pytest.mark.all(unless=lambda name: name in ALWAYS)
@pytest.mark.parametrize("name", CASES)
def test_each_part_has_the_size_of_the_engines(both, name):
    ranks, planner = (each[name] for each in both)
    assert planner["parts"] == ranks["parts"]
    assert sum(ranks["parts"]["states"]) == 2 * sum(ranks["parts"]["masters"]) > 0


@pytest.mark.all(unless=lambda name: name in ALWAYS)
@pytest.mark.parametrize("name", [name for name in CASES if "offloaded" not in name])
def test_what_lives_has_as_many_bytes(both, name):
    """After the engine is made, and after the last step, of all tensors that Python holds."""
    ranks, planner = (each[name]["held"] for each in both)
    assert planner == pytest.approx(ranks, abs=SMALL_TENSORS)


@pytest.mark.all
@pytest.mark.parametrize("name", [name for name in CASES if "offloaded" in name])
def test_pinned_memory_is_what_the_engine_pins_in_powers_of_two(both, name):
    ranks, planner = (each[name] for each in both)
    assert ranks["pinned"]
    blocks = [1 << (num_bytes - 1).bit_length() for num_bytes in ranks["pinned"]]
    # 1,152 bytes take a block of 2,048 that a partition of `zero.Init` had and gave back
    again = 2048 if name.startswith("3") else 0
    assert planner["plan"]["host_pinned_bytes_per_node"] == 2 * (sum(blocks) - again)
    assert planner["plan"]["host_ram_bytes_per_node"] > 2 * sum(blocks)


def test_states_are_those_of_the_paper(both):
    """Rajbhandari et al., ZeRO (2020), section 3: bytes of weights, gradients and Adam's states, for each rank of N."""
    num_ranks = 2
    for name, weights in (("3, checkpointing", 2 / num_ranks), ("2", 2)):
        plan = both[1][name]["plan"]
        expected = {
            "weights": weights,
            "gradients": 2 / num_ranks,
            "optimizer states": 12 / num_ranks,
        }
        for category, bytes_each in expected.items():
            assert plan["breakdown"][category] == pytest.approx(
                bytes_each * plan["num_parameters"], rel=0.01
            )
        assert any("not on a GPU" in line for line in plan["not_reliable"])


def test_pinned_blocks_are_kept_and_used_again():
    host = HostMemory()
    host.ranks = 2

    def pinned(num_bytes):
        storage = torch.UntypedStorage(num_bytes)
        host.pin(storage, "load")
        return storage, host.pinned_bytes

    first, after = pinned(3600)
    assert after == 2 * 4096
    _second, after = pinned(4000)
    assert after == 4 * 4096
    del first
    _third, after = pinned(4096)
    assert after == 4 * 4096 == host.peaks["load"]
    _fourth, after = pinned(4097)
    assert after == 4 * 4096 + 2 * 8192 == host.peaks["load"]


ZERO = {"stage": 3}


@pytest.mark.parametrize(
    ("config", "line"),
    [
        (
            {"zero_optimization": {"stage": 3, "offload_optimiser": {}}},
            "zero_optimization.offload_optimiser is not a known key",
        ),
        (
            {"zero_optimization": ZERO, "gradient_clippping": 1.0},
            "gradient_clippping is not a known key",
        ),
        (
            {"zero_optimization": ZERO, "comment": "mine", "zero_optimisation": {}},
            "zero_optimisation is not a known key",
        ),
        (
            {"zero_optimization": {"stage": "three"}},
            "zero_optimization.stage is 'three', but should be an integer",
        ),
    ],
)
def test_bad_input_is_one_line(config, line):
    with pytest.raises(PlanError, match=line) as told:
        refuse_config(config)
    assert not isinstance(told.value, NotPredicted)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("config", "what"),
    [
        ({}, "DeepSpeed without ZeRO (stage 0)"),
        (
            {"zero_optimization": {**ZERO, "offload_param": {"device": "nvme", "nvme_path": "/"}}},
            "offload_param to NVMe",
        ),
        (
            {"zero_optimization": {**ZERO, "zero_hpz_partition_size": 8}},
            "ZeRO++ (zero_hpz_partition_size)",
        ),
        (
            {"zero_optimization": {**ZERO, "zero_quantized_weights": True}},
            "ZeRO++ (zero_quantized_weights)",
        ),
        ({"zero_optimization": {**ZERO, "zenflow": {"topk_ratio": 0.1}}}, "ZenFlow"),
        (
            {"zero_optimization": {**ZERO, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}},
            "offloaded in part",
        ),
        (
            {"zero_optimization": ZERO, "tensor_parallel": {"autotp_size": 2}},
            "DeepSpeed's tensor_parallel",
        ),
        (
            {"zero_optimization": ZERO, "torch_autocast": {"enabled": True}},
            "DeepSpeed's torch_autocast",
        ),
        (
            {"zero_optimization": ZERO, "optimizer": {"type": "OneBitAdam", "params": {}}},
            "optimizer OneBitAdam",
        ),
        (
            {"zero_optimization": ZERO, "checkpoint": {"writer": {"type": "python"}}},
            "writer of checkpoints (checkpoint.writer)",
        ),
    ],
)
def test_what_is_not_known_is_refused_by_name(config, what):
    with pytest.raises(NotPredicted) as told:
        refuse_config(config)
    assert what in str(told.value)
