"""Why a card ran out of memory, out of the snapshot of a run whose end is known."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks.snapshots import read
from benchmarks.traces import KEPT
from tests.explain.recorded import (
    BACKWARD,
    FORWARD,
    HEAD,
    LOSS,
    MADE,
    MAIN,
    MODULE,
    SITE,
    STEP,
    Frames,
    RecordedCard,
    snapshot_of,
)
from tests.explain.test_snapshot_files import written
from trainer_plugins.allocator.model import AllocatorFull
from trainer_plugins.cli import app
from trainer_plugins.explain.answer import Explanation
from trainer_plugins.explain.snapshot import compare_snapshots, explain_snapshot
from trainer_plugins.snapshot.oom import case_of
from trainer_plugins.units import GIB, MIB

LAYERS = 4
GATHER: Frames = (
    ("/venv/lib/x/site-packages/transformers/trainer_pt_utils.py", 9, "nested_concat"),
    MAIN,
)


def train(
    card: RecordedCard,
    steps: int = 3,
    *,
    size: int = 10 * MIB,
    logits: int = 16 * MIB,
    keeps: bool = False,
) -> None:
    """Train four layers with Adam; `keeps` holds an activation of each step."""
    weights = [card.alloc(20 * MIB, MADE) for _ in range(LAYERS)]
    states: list[int] = []
    for _ in range(steps):
        activations = [card.alloc(size, FORWARD) for _ in weights]
        card.release(card.alloc(5 * MIB, FORWARD))
        head, loss = card.alloc(logits, HEAD), card.alloc(logits, LOSS)
        if keeps:
            activations.pop()
        gradients = []
        for activation in reversed(activations):
            temporary = card.alloc(size, BACKWARD)
            gradients.append(card.alloc(20 * MIB, BACKWARD))
            card.release(temporary, activation)
        card.release(head, loss)
        if not states:
            states = [card.alloc(40 * MIB, STEP) for _ in weights]
        card.release(*gradients)


def in_pieces(card: RecordedCard, wanted: int = 38 * MIB) -> None:
    """Leave 16 MiB free in each of 20 segments, and ask for more."""
    card.alloc(200 * MIB, MADE)
    card.release(*[card.alloc(40 * MIB, FORWARD) for _ in range(20)])
    for _ in range(20):
        card.alloc(24 * MIB, FORWARD)
    card.alloc(wanted, FORWARD)


def explained(card: RecordedCard, run: Callable[[RecordedCard], None], path: Path) -> Explanation:
    with pytest.raises(AllocatorFull):
        run(card)
    return explain_snapshot(card.dump(path))[1]


def test_the_categories_at_the_peak_are_what_was_planted(tmp_path):
    card = RecordedCard()
    train(card)
    case = case_of(card.dump(tmp_path / "snapshot.pickle"))
    assert case.held.allocated_bytes == card.peak_allocated_bytes
    assert case.at_end.categories == {"optimizer states": 160 * MIB, "parameters": 80 * MIB}
    assert case.at_end.allocated_bytes == case.card.allocated_bytes == card.allocated_bytes

    allocations = [
        (at, event) for at, event in enumerate(case.card.events) if event.action == "alloc"
    ]
    loss = [at for at, event in allocations if event.num_bytes == 16 * MIB][-1]
    always = {"optimizer states": 160 * MIB, "parameters": 80 * MIB}
    assert case.sorter.find_held(loss).categories == {
        **always,
        "activations": LAYERS * 10 * MIB,
        "logits": 2 * 16 * MIB,
    }
    lines = {place: num_bytes for place, num_bytes, _ in case.sorter.find_held(loss).lines}
    assert lines["project/model.py:20 forward"] == LAYERS * 10 * MIB
    assert lines["project/model.py:30 forward"] == 16 * MIB
    assert lines["project/model.py:9 __init__"] == 80 * MIB

    third = [at for at, event in allocations if event.num_bytes == 20 * MIB][-2]
    assert case.sorter.find_held(third).categories == {
        **always,
        "gradients": 3 * 20 * MIB,
        "logits": 2 * 16 * MIB,
        "activations": 2 * 10 * MIB,
        "temporaries": 10 * MIB,
    }
    short = [at for at, event in allocations if event.num_bytes == 5 * MIB][-1]
    assert case.sorter.find_held(short).categories["temporaries"] == 5 * MIB


LINEAR = (f"{SITE}/torch/nn/modules/linear.py", 134, "forward")
LORA = (f"{SITE}/peft/tuners/lora/layer.py", 700, "forward")
LLAMA = f"{SITE}/transformers/models/llama/modeling_llama.py"
CALLED = (
    (f"{SITE}/transformers/utils/generic.py", 800, "wrapper"), MODULE,
    (f"{SITE}/peft/peft_model.py", 1800, "forward"), MODULE,
    (f"{SITE}/transformers/trainer.py", 4000, "compute_loss"), MAIN,
)  # fmt: skip
LAYER = ((LLAMA, 240, "forward"), MODULE, (LLAMA, 300, "forward"), MODULE, (LLAMA, 480, "forward"))
OF_HEADS: dict[str, Frames] = {
    "lm_head": (LINEAR, MODULE, (LLAMA, 480, "forward"), *CALLED),
    "lm_head with LoRA": (LINEAR, MODULE, LORA, MODULE, (LLAMA, 480, "forward"), *CALLED),
    "in bf16, of a model of one's own": HEAD,
    "a function of one's own": (("/me/model.py", 9, "compute_logits"), HEAD[0], MODULE, MAIN),
}


@pytest.mark.parametrize("name", OF_HEADS)
def test_the_product_of_the_head_is_logits_and_other_products_are_not(name, tmp_path):
    card = RecordedCard(200 * MIB)
    for _ in range(LAYERS):
        card.alloc(10 * MIB, (LINEAR, MODULE, *LAYER, *CALLED))
    head = card.alloc(16 * MIB, OF_HEADS[name])
    if OF_HEADS[name] is HEAD:  # by its size: half of what the loss makes of it in float32
        card.alloc(32 * MIB, LOSS)
    case = case_of(card.dump(tmp_path / "snapshot.pickle"))
    loss = 32 * MIB if OF_HEADS[name] is HEAD else 0
    assert case.at_end.categories == {"activations": 40 * MIB, "logits": 16 * MIB + loss}
    assert head in card.live

    with pytest.raises(AllocatorFull):
        card.alloc(160 * MIB, OF_HEADS[name] if loss == 0 else LOSS)
    _, found = explain_snapshot(card.dump(tmp_path / "snapshot.pickle"))
    assert found.causes[0].code == "logits-loss"


FSDP, ZERO = f"{SITE}/torch/distributed/fsdp", f"{SITE}/deepspeed/runtime/zero"
OPERATIONS, FUNCTION = (
    f"{SITE}/accelerate/utils/operations.py",
    f"{SITE}/torch/autograd/function.py",
)
TRAINER = (f"{SITE}/transformers/trainer.py", 2164, "compute_loss")
# Frames as dry cards recorded them, of torch 2.11, transformers 5.23, DeepSpeed 0.19.8, TRL 1.16.
OF_LIBRARIES: dict[str, tuple[str, Frames]] = {
    "FSDP2": ("gathered parameters", (
        (f"{FSDP}/_fully_shard/_fsdp_collectives.py", 59, "allocate"),
        (f"{FSDP}/_fully_shard/_fsdp_collectives.py", 263, "foreach_all_gather"),
        (f"{FSDP}/_fully_shard/_fsdp_param_group.py", 339, "unshard"),
        (f"{FSDP}/_fully_shard/_fsdp_param_group.py", 449, "pre_forward"), MODULE, *LAYER, *CALLED,
    )),
    "FSDP1": ("gathered parameters", (
        (f"{SITE}/torch/storage.py", 1270, "_resize_"),
        (f"{FSDP}/_flat_param.py", 1409, "_alloc_padded_unsharded_flat_param"),
        (f"{FSDP}/_flat_param.py", 1382, "unshard"),
        (f"{FSDP}/_runtime_utils.py", 305, "_unshard"), MODULE, *LAYER, *CALLED,
    )),
    "ZeRO-3": ("gathered parameters", (
        (f"{ZERO}/partition_parameters.py", 1388, "_all_gather_sequential"),
        (f"{ZERO}/partitioned_param_coordinator.py", 580, "__all_gather_params"),
        (f"{ZERO}/partitioned_param_coordinator.py", 344, "fetch_sub_module"), MODULE, *LAYER,
    )),
    "FSDP1's shards": ("parameters", (
        (f"{FSDP}/_flat_param.py", 905, "shard"),
        (f"{SITE}/accelerate/accelerator.py", 2037, "prepare_model"), MAIN,
    )),
    "FSDP1's gradients": ("gradients", (
        (f"{FSDP}/_runtime_utils.py", 1048, "_cast_grad_to_param_dtype"),
        (f"{FSDP}/_runtime_utils.py", 766, "_post_backward_hook"),
    )),
    "a function of DeepSpeed's": ("gradients", (
        (f"{ZERO}/linear.py", 129, "backward"), (FUNCTION, 317, "apply"),
    )),
    "a cache": ("KV cache", (
        (f"{SITE}/transformers/cache_utils.py", 137, "update"),
        (f"{SITE}/transformers/cache_utils.py", 1570, "update"), (LLAMA, 251, "forward"), MODULE, MAIN,
    )),
    "accelerate's float32 outputs": ("logits", (
        (OPERATIONS, 902, "_convert_to_fp32"), (OPERATIONS, 931, "__call__"), MODULE, TRAINER, MAIN,
    )),
    "TRL's loss in chunks": ("logits", (
        (f"{SITE}/trl/kernels/chunked_logprob.py", 413, "backward"), (FUNCTION, 317, "apply"),
    )),
    "PEFT's float32 copies": ("parameters", (
        (f"{SITE}/peft/utils/other.py", 209, "prepare_model_for_kbit_training"), MAIN,
    )),
}  # fmt: skip


@pytest.mark.parametrize("name", OF_LIBRARIES)
def test_what_libraries_make_has_its_name_also_if_it_lives_shortly(name, tmp_path):
    category, frames = OF_LIBRARIES[name]
    card = RecordedCard(200 * MIB)
    made = card.alloc(20 * MIB, frames)
    case = case_of(card.dump(tmp_path / "snapshot.pickle"))
    assert case.at_end.categories == {category: 20 * MIB}
    if category in ("gathered parameters", "KV cache", "logits"):
        card.release(made)
        case = case_of(card.dump(tmp_path / "snapshot.pickle"))
        assert case.held.categories == {category: 20 * MIB}


def test_a_gather_within_the_backward_pass_does_not_end_it(tmp_path):
    card = RecordedCard()
    card.alloc(4 * MIB, FORWARD)
    gradient = card.alloc(10 * MIB, BACKWARD)
    gathered = card.alloc(20 * MIB, OF_LIBRARIES["FSDP2"][1])
    card.alloc(10 * MIB, BACKWARD)
    card.release(gathered, gradient)
    card.alloc(8 * MIB, BACKWARD)
    case = case_of(card.dump(tmp_path / "snapshot.pickle"))
    assert [each.kind for each in case.sorter.passes] == ["forward", "backward"]
    assert case.held.categories == {
        "gathered parameters": 20 * MIB,
        "temporaries": 10 * MIB,
        "gradients": 10 * MIB,
        "activations": 4 * MIB,
    }


def test_the_gradient_of_the_logits_is_theirs_by_its_size(tmp_path):
    card = RecordedCard()
    head, loss = card.alloc(16 * MIB, HEAD), card.alloc(32 * MIB, LOSS)
    card.release(card.alloc(32 * MIB, BACKWARD))
    card.alloc(20 * MIB, BACKWARD)
    card.release(head, loss)
    case = case_of(card.dump(tmp_path / "snapshot.pickle"))
    assert case.held.categories == {"logits": 80 * MIB}


def test_a_layer_that_cannot_be_gathered_is_named(tmp_path):
    def run(card: RecordedCard) -> None:
        train(card, 1)
        card.alloc(200 * MIB, OF_LIBRARIES["ZeRO-3"][1])

    found = explained(RecordedCard(420 * MIB), run, tmp_path / "snapshot.pickle")
    assert found.causes[0].code == "zero3-gather"


def test_a_healthy_run_has_no_cause_and_its_cache_is_not_called_fragmentation(tmp_path):
    card = RecordedCard()
    train(card)
    _, found = explain_snapshot(card.dump(tmp_path / "snapshot.pickle"))
    assert found.causes == ()
    assert found.remedies == ()
    assert found.facts[0] == (
        "372.0 MiB (390,070,272 bytes) were allocated at the peak of card 0, most of it optimizer"
        " states (160.0 MiB); no OOM is recorded"
    )
    assert any("that is the cache" in fact for fact in found.facts)


def test_fragmentation_is_found_and_the_setting_named_first_makes_the_run_pass(tmp_path):
    path = tmp_path / "snapshot.pickle"
    found = explained(RecordedCard(1 * GIB), in_pieces, path)
    assert found.facts[0].startswith("It ran out of memory")
    assert [cause.code for cause in found.causes] == ["fragmentation"]
    assert found.causes[0].grade == "certain"
    first = found.remedies[0]
    assert first.do == "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    assert (first.grade, first.cause) == ("replayed", "fragmentation")
    in_pieces(RecordedCard(1 * GIB, expandable_segments=True))  # what it says to do


def test_a_setting_is_not_named_where_the_replay_cannot_tell_it_from_luck(tmp_path):
    """The recording holds no more than the OOM, so nobody knows how the gaps came about."""
    card = RecordedCard(1 * GIB)
    with pytest.raises(AllocatorFull):
        in_pieces(card)
    _, found = explain_snapshot(card.dump(tmp_path / "snapshot.pickle", last=1))
    assert found.causes[0].code == "fragmentation"
    assert found.causes[0].grade == "likely"
    assert "the recorded settings fit too" in found.causes[0].doubt
    assert not any("CONF" in remedy.do for remedy in found.remedies)


def test_gaps_that_would_not_suffice_together_are_not_the_cause(tmp_path):
    path = tmp_path / "snapshot.pickle"
    found = explained(RecordedCard(1 * GIB), lambda card: in_pieces(card, 600 * MIB), path)
    assert [cause.code for cause in found.causes] == ["capacity"]


def test_a_full_card_is_not_called_fragmented_and_what_is_named_makes_the_run_pass(tmp_path):
    path = tmp_path / "snapshot.pickle"
    found = explained(RecordedCard(150 * MIB), lambda card: train(card, size=20 * MIB), path)
    assert found.causes[0].code == "capacity"
    assert found.causes[0].grade == "certain"
    assert any("not fragmentation" in each for each in found.causes[0].evidence)
    assert not any("CONF" in remedy.do for remedy in found.remedies)
    assert "--per_device_train_batch_size" in found.remedies[0].do
    assert any("no gap" in each or "gaps" in each for each in found.unknown)
    with pytest.raises(AllocatorFull):  # as the remedy says, only this request was checked
        train(RecordedCard(150 * MIB), size=10 * MIB)
    train(RecordedCard(400 * MIB), size=10 * MIB)


@pytest.mark.parametrize(
    ("code", "capacity", "story", "remedy"),
    [
        ("leak", 800 * MIB, {"steps": 99, "keeps": True}, ".item()"),
        ("logits-loss", 400 * MIB, {"logits": 200 * MIB}, "--per_device_train_batch_size"),
        ("optimizer-state", 260 * MIB, {}, "--optim adamw_bnb_8bit"),
    ],
)
def test_the_cause_that_was_planted_comes_first(
    code: str, capacity: int, story: dict[str, Any], remedy: str, tmp_path: Path
) -> None:
    found = explained(
        RecordedCard(capacity), lambda card: train(card, **story), tmp_path / "snapshot.pickle"
    )
    assert found.causes[0].code == code
    assert remedy in found.remedies[0].do
    assert found.remedies[0].cause == code
    assert {each.grade for each in found.remedies} == {"replayed"}


def test_a_batch_that_is_longer_than_all_before_is_named(tmp_path):
    def run(card: RecordedCard) -> None:
        train(card, 3)
        train(card, 1, size=100 * MIB)

    found = explained(RecordedCard(600 * MIB), run, tmp_path / "snapshot.pickle")
    assert found.causes[0].code == "long-sample"
    assert "10.0 times" in found.causes[0].evidence[1]


def test_gathered_logits_of_an_evaluation_are_named(tmp_path):
    def run(card: RecordedCard) -> None:
        for batch in range(1, 20):
            card.alloc(batch * 20 * MIB, GATHER)

    found = explained(RecordedCard(600 * MIB), run, tmp_path / "snapshot.pickle")
    assert found.causes[0].code == "eval-logits"
    assert "preprocess_logits_for_metrics" in found.remedies[0].do
    assert [each.grade for each in found.remedies][:2] == ["known", "known"]


def test_a_card_that_others_fill_meanwhile_is_foreign(tmp_path):
    card = RecordedCard(8 * GIB)
    held = card.alloc(1 * GIB, FORWARD)
    with pytest.raises(AllocatorFull):
        card.alloc(9 * GIB, FORWARD)
    card.capacity_bytes = 3 * GIB
    found = explained(card, lambda card: train(card, 9, size=GIB), tmp_path / "snapshot.pickle")
    assert held in card.live
    assert found.causes[0].code == "foreign"
    assert "the last of 2" in found.facts[0]


@pytest.mark.parametrize(
    ("code", "event"),
    [
        ("impossible-size", {"size": 5 << 50, "device_free": 1 * GIB}),
        ("contradictory", {"size": 1 * GIB, "device_free": 20 * GIB}),
    ],
)
def test_a_request_that_no_memory_remedy_helps_gets_none_of_them_first(code, event, tmp_path):
    card = RecordedCard()
    train(card, 1)
    card.note("oom", 0, **event)
    _, found = explain_snapshot(card.dump(tmp_path / "snapshot.pickle"))
    assert [cause.code for cause in found.causes] == [code]
    assert found.remedies == ()


def test_what_waits_for_another_stream_is_counted_apart(tmp_path):
    card = RecordedCard()
    kept, waiting = card.alloc(20 * MIB, FORWARD), card.alloc(40 * MIB, FORWARD)
    card.note("free_requested", waiting, 40 * MIB)
    card.alloc(20 * MIB, FORWARD)
    raw = card.snapshot()
    for segment in raw["segments"]:
        for block in segment["blocks"]:
            if block["address"] == waiting:
                block["state"] = "active_awaiting_free"
                segment["allocated_size"] -= block["size"]
    case = case_of(written(raw, tmp_path))
    assert kept in card.live
    assert case.at_end.categories["waiting"] == 40 * MIB
    assert case.at_end.allocated_bytes == case.card.allocated_bytes == 40 * MIB


@pytest.mark.parametrize(
    "name", ["cold-wsl-forward-mixed", "expandable-forward", "growth-forward-mixed"]
)
def test_a_real_trace_is_summed_and_repeated_to_the_byte(name, tmp_path):
    (trace,) = read(KEPT / f"{name}.json.gz")
    case = case_of(written(snapshot_of(trace), tmp_path))
    assert case.card.index == 1
    assert case.repeated is not None
    assert case.repeated.outcome.is_same
    assert case.repeated.outcome.replayed_peak_bytes == case.peak_reserved_bytes
    assert case.at_end.allocated_bytes == case.card.allocated_bytes > 0
    assert case.held.allocated_bytes >= case.at_end.allocated_bytes


def test_what_was_given_back_counts_in_the_peak(tmp_path):
    card = RecordedCard()
    card.release(card.alloc(100 * MIB, FORWARD))
    card.empty_cache()
    card.alloc(30 * MIB, FORWARD)
    case = case_of(card.dump(tmp_path / "snapshot.pickle"))
    assert case.peak_reserved_bytes == 100 * MIB
    assert case.card.reserved_bytes == 30 * MIB


def test_a_block_from_before_the_recording_has_its_whole_size(tmp_path):
    card = RecordedCard()
    early = card.alloc(20 * MIB - 512, MADE)  # too little is left of its segment to be cut off
    recorded = len(card.events)
    card.release(early)
    card.release(card.alloc(30 * MIB, FORWARD))
    case = case_of(card.dump(tmp_path / "snapshot.pickle", last=len(card.events) - recorded))
    assert case.sorter.find_held(-1).categories == {"unknown": 20 * MIB}


def test_a_split_size_that_the_file_names_is_repeated_too(tmp_path):
    card = RecordedCard(max_split_bytes=64 * MIB)
    card.release(card.alloc(100 * MIB, FORWARD))
    card.alloc(30 * MIB, FORWARD)  # not out of the 100 MiB, which are too large to be split
    assert card.reserved_bytes == 130 * MIB
    case = case_of(card.dump(tmp_path / "snapshot.pickle"))
    assert case.repeated is not None
    assert case.repeated.outcome.is_same
    assert case.repeated.outcome.replayed_peak_bytes == 130 * MIB


def test_what_grew_between_two_snapshots_is_named_with_its_line(tmp_path):
    card = RecordedCard()
    train(card, 2, keeps=True)
    before = card.dump(tmp_path / "before.pickle")
    for _ in range(30):
        card.alloc(10 * MIB, FORWARD)
    card.alloc(50 * MIB, STEP)
    _, found = compare_snapshots(before, card.dump(tmp_path / "after.pickle"))
    assert found.causes[0].code == "leak"
    assert found.causes[0].grade == "possible"
    assert "350.0 MiB more" in found.causes[0].summary
    assert "+300.0 MiB activations" in found.facts
    assert "+300.0 MiB from project/model.py:20 forward" in found.facts
    assert "+50.0 MiB optimizer states" in found.facts
    assert compare_snapshots(before, before)[1].causes == ()


def command(*paths: Path) -> tuple[int, str]:
    done = CliRunner().invoke(
        app, ["explain", "--verbose", *map(str, paths)], env={"COLUMNS": "200"}
    )
    return done.exit_code, done.output


def test_the_command_reads_snapshots_and_compares_two(tmp_path):
    healthy, full = RecordedCard(), RecordedCard(1 * GIB)
    train(healthy)
    before = healthy.dump(tmp_path / "before.pickle")
    died = tmp_path / "died.pickle"
    explained(full, in_pieces, died)

    code, out = command(died)
    assert code == 0
    assert "[certain: fragmentation]" in out
    assert "Try    export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in out
    code, out = command(before)
    assert code == 0
    assert out.startswith(f"{before}: 372.0 MiB (390,070,272 bytes) were allocated at the peak of")
    assert "no out-of-memory error found" not in out
    assert "% activations" in out
    code, out = command(before, died)
    assert code == 0
    assert "no out-of-memory" not in out
    hostile = tmp_path / "hostile.pickle"
    hostile.write_bytes(b"\x80\x04cos\nsystem\n(S'true'\ntR.")
    assert command(hostile)[0] == command(before, hostile)[0] == command(before, died, died)[0] == 2
