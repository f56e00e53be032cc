"""Plans of a streamed base for a CUDA card: what goes over the bus, what is pinned, what is refused."""

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from typer.main import get_command

from tests.planner.several import IS_TOO_OLD, WHY_NOT
from tests.planner.test_closed_loop import run
from tests.planner.test_closed_loop_streaming import llama, rows, with_lora
from tests.planner.test_quantised import needs_5
from tests.planner.test_search import NOTHING
from tests.processes import ENDS_A_HANG
from trainer_plugins import StreamBase
from trainer_plugins.cli import app
from trainer_plugins.cli.plan import command_of
from trainer_plugins.cli.plan_inputs import inputs_of
from trainer_plugins.cli.plan_options import RunOptions
from trainer_plugins.cli.typed_options import value_of
from trainer_plugins.planner import MemoryPlan, PlanError
from trainer_plugins.planner.cards import Card
from trainer_plugins.planner.compare.lines import STREAMED, SearchRequest
from trainer_plugins.planner.compare.saved import explain, turned
from trainer_plugins.planner.compare.search import search
from trainer_plugins.planner.compare.switches import source_of
from trainer_plugins.planner.plan import Streamed
from trainer_plugins.planner.predict import predict_all
from trainer_plugins.planner.rehearse.gather import request_of
from trainer_plugins.planner.request import ConfigSource, PlanRequest
from trainer_plugins.report.plan_text import details
from trainer_plugins.report.plans_text import line_in_words
from trainer_plugins.units import MIB

pytest.importorskip("peft")
pytestmark = [pytest.mark.all, pytest.mark.slow]

LAYERS = 5
LLAMA = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 8192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": LAYERS,
    "vocab_size": 512,
}
LAYER_BYTES = 2 * (2 * 512 * 512 + 2 * 512 * 256 + 3 * 512 * 8192)  # in bf16, without its norms
MICRO_STEPS = 4  # the third is not rehearsed
IN_4_BITS = {"load_in_4bit": True, "bnb_4bit_compute_dtype": "bfloat16"}


def small(resident_layers: int | None, lora_r: int | None = 4, **source: Any) -> PlanRequest:
    """One row at once, so that nothing but the base is large."""
    flags = ("--output_dir", "runs", "--save_strategy", "no", "--gradient_checkpointing", "True")
    kind = ("--gradient_checkpointing_kwargs", '{"use_reentrant": false}')  # transformers 4: True
    steps = ("--per_device_train_batch_size", "1", "--gradient_accumulation_steps")
    adapter = {"peft_type": "LORA", "r": lora_r, "target_modules": ["q_proj"]}
    run = ConfigSource(
        config=LLAMA,
        arguments=(*flags, *kind, *steps, str(MICRO_STEPS)),
        sequence_length=32,
        dtype="bfloat16",
        peft=adapter if lora_r is not None else None,
        **source,
    )
    return PlanRequest(source=run, resident_layers=resident_layers, num_steps=1)


CARD = Card(name="small", capacity_bytes=130 * MIB, capability=(8, 0), context_bytes=0)
"""Too small for the base of 134 MB in bf16."""

BASE = Streamed(
    num_layers=LAYERS, resident_layers=2, num_bytes=1, copied_bytes_per_micro_batch=25 * 10**8
).with_step_of(1)

RUNS = {
    "resident": small(None),
    "one layer": small(1),
    "4 bits": small(2, quantisation=IN_4_BITS),
    "two ranks": replace(small(1), num_gpus=2),
    "too large": replace(small(None), card=CARD, proposes=True),
    "no adapter": small(2, lora_r=None),
    "too many": small(LAYERS + 1),
    "8 bits": small(2, quantisation={"load_in_8bit": True}),
}


@pytest.fixture(scope="module")
def outcomes() -> dict[str, MemoryPlan | PlanError]:
    return dict(zip(RUNS, predict_all([*RUNS.values()], ENDS_A_HANG), strict=True))


def test_the_base_leaves_the_card_but_for_the_layers_that_are_asked_for(outcomes):
    resident, plan = outcomes["resident"], outcomes["one layer"]
    left = (LAYERS - 1) * LAYER_BYTES
    frozen = [each.breakdown["frozen weights"] for each in (resident, plan)]
    assert frozen[0] - frozen[1] == left
    peaks = [each.allocated_peak_bytes for each in (resident, plan)]
    assert peaks[0] - peaks[1] == pytest.approx(left, rel=0.01)
    assert resident.host_pinned_bytes_per_node < LAYER_BYTES
    assert plan.host_pinned_bytes_per_node >= LAYERS * LAYER_BYTES


def test_a_step_copies_the_others_twice_for_each_micro_batch(outcomes):
    plan = outcomes["one layer"]
    base = plan.streamed
    assert (base.num_layers, base.resident_layers) == (LAYERS, 1)
    assert base.num_bytes == LAYERS * LAYER_BYTES
    assert base.copied_bytes_per_step == MICRO_STEPS * 2 * (LAYERS - 1) * LAYER_BYTES
    assert MemoryPlan.from_json(plan.to_json()) == plan
    (line,) = (line for line in details(plan) if "streamed" in line)
    assert "in 5 layers, is streamed: 1 of them are on the card" in line
    assert "at least 0.034 s a step at 25 GB/s (PCIe 4.0 x16; 5.0 has twice that)" in line


@needs_5
def test_a_base_in_4_bits_takes_its_scales_along(outcomes):
    plan = outcomes["4 bits"]
    elements = LAYER_BYTES // 2
    assert plan.streamed.num_bytes == LAYERS * (elements // 2 + 4 * elements // 64)
    assert any('device_map="cpu"' in line for line in plan.assumptions)


@pytest.mark.skipif(IS_TOO_OLD, reason=WHY_NOT)
def test_each_rank_has_its_own_copy_in_main_memory(outcomes):
    two, one = outcomes["two ranks"], outcomes["one layer"]
    assert two.host_pinned_bytes_per_node >= 2 * one.streamed.num_bytes
    assert two.streamed == one.streamed


def test_a_run_that_does_not_fit_is_told_that_it_would_and_what_that_costs(outcomes):
    plan = outcomes["too large"]
    assert plan.fits is False
    found = next(each for each in plan.proposals if "base streamed" in each.changes)
    assert found.flags == "--stream-base 2"
    assert found.price == (
        "the base comes over the bus, at least 0.026 s a step at 25 GB/s"
        " (PCIe 4.0 x16; 5.0 has twice that)"
    )


def test_a_search_streams_where_nothing_fits_without():
    asked = SearchRequest(run=replace(small(None), card=CARD), lengths=(32,))
    args = SimpleNamespace(per_device_train_batch_size=1, gradient_accumulation_steps=4)

    def streamed(request: PlanRequest) -> MemoryPlan:
        if request.resident_layers is None:
            return replace(NOTHING, fits=False)
        flags = source_of(request).arguments
        assert isinstance(flags, tuple)
        given = dict(zip(flags[::2], flags[1::2], strict=True))
        steps = int(given["--gradient_accumulation_steps"])
        return replace(NOTHING, fits=True, streamed=BASE.with_step_of(steps))

    found = search(asked, args, streamed, lambda request: (streamed(request), True))
    assert found.best is not None
    assert found.best.strategy == STREAMED
    assert found.best.micro_batch == 4, "rows share a copy"
    assert line_in_words(found.best).endswith(
        "at least 0.100 s a step at 25 GB/s (PCIe 4.0 x16; 5.0 has twice that)"
    )

    found = search(asked, args, lambda _: replace(NOTHING, fits=True), lambda _: (NOTHING, True))
    assert dict(found.not_tried)[STREAMED].startswith("streaming the base is slower, and single")


@pytest.mark.parametrize(("when", "asked"), [("always", (3, True)), ("needed", (None, False))])
def test_a_trainer_is_planned_as_its_callback_says(tmp_path, when, asked):
    """On a machine without a card, where the callback itself can do nothing."""
    model = with_lora(llama(), 0.0)
    trainer = run(tmp_path, model, data=rows(), callbacks=[StreamBase(3, True, when=when)])
    request = request_of(trainer, CARD, "", 1, None)
    assert (request.resident_layers, request.streams_embeddings) == asked


def test_the_command_says_how_many_layers_are_on_the_card(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    words = ["--model", str(tmp_path), "--lora-r", "4", "--stream-base", "3"]
    commands: Any = get_command(app)
    context = commands.commands["plan"].make_context("plan", words)
    details, _ = inputs_of(value_of(RunOptions, context.params), context.args)
    assert details.resident_layers == 3
    assert command_of(context).endswith("--stream-base 3")


def test_what_streaming_would_save_is_asked_by_name():
    runs = small(None), small(None, lora_r=None), small(2)
    asked: list[PlanRequest] = []

    def predict_all(requests):
        asked.extend(requests)
        return [
            NOTHING if each.resident_layers is None else replace(NOTHING, streamed=BASE)
            for each in requests
        ]

    saved = [explain(run, ("stream",), predict_all, turned)[1][0] for run in runs]
    assert [each.resident_layers for each in asked] == [None, 2, None, 2]
    assert "--stream-base 2" in saved[0].how
    assert "at least 0.100 s a step" in saved[0].how
    assert [each.reason for each in saved] == [
        None,
        "this run trains all its weights, and only a frozen base is streamed: see lora",
        "this run already streams its base",
    ]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("no adapter", "none of its 5 layers has frozen weights"),
        pytest.param("8 bits", "its base is in int8 of bitsandbytes", marks=needs_5),
        ("too many", "a number of layers from 1 to 5, got 6"),
    ],
)
def test_what_cannot_be_streamed_is_refused_with_the_reason(outcomes, name, why):
    assert "the base of this run cannot be streamed" in str(outcomes[name])
    assert why in str(outcomes[name])
