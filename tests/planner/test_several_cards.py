"""Models that one process spreads over several cards by a `device_map`.

The simulated card is one, so each card is measured in a run of its own: there it is the simulated
one, and the other cards are the CPU. accelerate's hooks move tensors between both as between cards.
"""

import gc
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from accelerate import dispatch_model, infer_auto_device_map
from transformers import Trainer

from tests.planner.test_closed_loop import EVALUATES, gpt2, llama, rows, run, t5, with_lora
from tests.processes import ENDS_A_HANG
from trainer_plugins import MemoryPlan, MemoryWatchdog, plan_run
from trainer_plugins.planner import NotPredicted, PlanError, calibrate
from trainer_plugins.planner.predict import predict_all
from trainer_plugins.planner.rehearse.gather import request_of
from trainer_plugins.units import GIB, MIB, size

pytestmark = pytest.mark.all


def divided(*cards: list[str]) -> dict[str, int]:
    """A device_map, of the parts that lie on each card."""
    return {part: card for card, parts in enumerate(cards) for part in parts}


LLAMA = divided(
    ["model.embed_tokens", "model.rotary_emb", "model.layers.0"],
    ["model.layers.1", "model.layers.2", "model.layers.3", "model.norm", "lm_head"],
)
GPT2 = divided(
    [*(f"transformer.{part}" for part in ("wte", "wpe", "drop", "h.0")), "lm_head"],
    ["transformer.h.1"],
    ["transformer.h.2", "transformer.ln_f"],
)


def t5_without_cache():
    """The cache of keys begins with an empty tensor, which the simulated card has on its first."""
    model = t5()
    model.config.use_cache = model.decoder.config.use_cache = False
    return model


def t5_map() -> dict[str, int]:
    """As `device_map="auto"` divides it: all that shares its weights on the first card."""
    whole = sum(each.numel() * 4 for each in t5().parameters())
    return infer_auto_device_map(
        t5(), {0: int(0.7 * whole), 1: whole}, no_split_module_classes=["T5Block"]
    )


class Spread(NamedTuple):
    """A model, the card of each of its parts, and what the Trainer is given."""

    make: Callable[[], Any]
    device_map: dict[str, int]
    arguments: Mapping[str, Any] = MappingProxyType({})


RUNS = {
    "fp32": Spread(llama, LLAMA),
    "checkpointing": Spread(llama, LLAMA, {"gradient_checkpointing": True}),
    "bf16": Spread(lambda: llama(torch.bfloat16), LLAMA, {"gradient_accumulation_steps": 3}),
    "autocast": Spread(llama, LLAMA, {"bf16": True}),
    "lora": Spread(lambda: llama(torch.bfloat16), LLAMA, {"learning_rate": 1e-4}),
    "three cards": Spread(gpt2, GPT2, {"data": rows(padded=True)}),
    "tied weights": Spread(t5_without_cache, t5_map(), {**EVALUATES, "evaluation": rows(8)}),
}


def trainer_of(name, folder, places=None) -> Trainer:
    """The Trainer of a run, on these devices; without them only the map says where parts are."""
    make, device_map, arguments = RUNS[name]
    model = make()
    if places is None:
        model.hf_device_map = dict(device_map)
    else:
        dispatch_model(
            model,
            {part: places[card] for part, card in device_map.items()},
            main_device=places[0],
            skip_keys=model._skip_keys_device_placement,
        )
    if places is not None and "bf16" in arguments:  # accelerate casts on one kind of device only
        for kind in ("cpu", "simgpu"):
            model.forward = torch.autocast(kind, torch.bfloat16)(model.forward)
    if name == "lora":
        model = with_lora(model)
    return run(folder, model, **arguments)


@pytest.fixture(scope="module")
def plans() -> dict[str, MemoryPlan | PlanError]:
    return {}


@pytest.mark.all(
    unless=lambda name, card: card == 0 and name in ("bf16", "lora", "tied weights", "three cards")
)
@pytest.mark.parametrize(
    ("name", "card"),
    [(name, card) for name, each in RUNS.items() for card in sorted({*each.device_map.values()})],
)
def test_each_card_holds_what_was_planned_for_it(name, card, plans, simgpu, tmp_path, monkeypatch):
    simgpu.set_capacity(4 * GIB)
    if name not in plans:
        request = request_of(trainer_of(name, tmp_path), None, "", None, None)
        monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
        (plans[name],) = predict_all([request], ENDS_A_HANG)
    plan = plans[name]
    assert isinstance(plan, MemoryPlan), plan
    places = [torch.device("simgpu:0" if each == card else "cpu") for each in range(3)]
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", str(places[0]))
    gc.unfreeze()
    gc.collect()
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats()

    trainer = trainer_of(name, tmp_path, places)
    assert trainer.is_model_parallel
    trainer.train()

    planned = plan.cards[card]
    assert planned.allocated_bytes == pytest.approx(
        torch.accelerator.max_memory_allocated(), rel=0.002
    )
    assert planned.reserved_bytes == pytest.approx(
        torch.accelerator.max_memory_reserved(), rel=0.01
    )


@pytest.fixture
def where_no_card_is(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")


def test_the_verdict_is_that_of_the_fullest_card(where_no_card_is, tmp_path):
    """640 MiB less a context of 512 are enough for the first card, and not for the second."""
    plan = plan_run(trainer_of("fp32", tmp_path), gpu="640MiB,sm_90")

    first, second = plan.cards
    assert first.reserved_bytes < 128 * MIB < second.allocated_bytes
    assert (plan.fits, plan.reserved_peak_bytes) == (False, second.reserved_bytes)
    (said,) = [each for each in plan.assumptions if "card 0" in each]
    assert f"card 0: {size(first.reserved_bytes)}, card 1: {size(second.reserved_bytes)}" in said
    assert "all other figures are of card 1" in said
    assert plan.planned["strategy"] == "one process, 2 cards (device_map)"
    # on each card one handle of cuBLAS for the forward, and one for the thread of its backward
    assert plan.breakdown["workspaces"] == 2 * 32 * MIB
    assert MemoryPlan.from_json(plan.to_json()) == plan


def test_the_timeline_of_one_card_is_not_compared_with_the_plan_of_another(
    simgpu, make_trainer, tmp_path
):
    watched = make_trainer(MemoryWatchdog(), max_steps=2)
    watched.train()
    with pytest.raises(PlanError, match="is for the fullest of 2 cards of one process"):
        calibrate(plan_run(trainer_of("fp32", tmp_path)), watched.args.output_dir)


def test_a_model_that_is_dispatched_already_is_planned_the_same(where_no_card_is, tmp_path):
    """It comes with accelerate's hooks, and its weights are on the cards."""
    trainer = trainer_of("fp32", tmp_path)
    hooked = trainer_of("fp32", tmp_path)
    dispatch_model(hooked.model, {"": torch.device("cpu")}, force_hooks=True)
    hooked.model.hf_device_map = {part: f"cuda:{card}" for part, card in LLAMA.items()}
    before = hooked.model.forward

    assert plan_run(hooked).cards == plan_run(trainer, num_gpus=2).cards

    assert hooked.model.forward is before  # the user's Trainer is left as it was


def test_tied_weights_on_two_cards_are_refused_because_the_run_fails(simgpu, tmp_path):
    apart = {"shared": 0, "encoder": 0, "decoder": 1, "lm_head": 1}
    places = [torch.device("simgpu:0"), torch.device("cpu")]
    model = dispatch_model(
        t5(), {part: places[card] for part, card in apart.items()}, main_device=places[0]
    )
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        run(tmp_path, model).train()

    planned = t5()
    planned.hf_device_map = apart
    with pytest.raises(PlanError, match=r"lm_head\.weight on card 1, shared\.weight on card 0"):
        plan_run(run(tmp_path, planned))


def test_what_is_refused(where_no_card_is, tmp_path):
    trainer = trainer_of("fp32", tmp_path)
    with pytest.raises(PlanError, match="spread over 2 cards, and num_gpus is 8"):
        plan_run(trainer, num_gpus=8)
    trainer.model.hf_device_map["lm_head"] = "cpu"
    with pytest.raises(NotPredicted, match=r"leaves off the cards \(lm_head\)"):
        plan_run(trainer)
    trainer.model.hf_device_map["lm_head"] = 16
    with pytest.raises(NotPredicted, match="over 17 cards: the most is 16"):
        plan_run(trainer)
