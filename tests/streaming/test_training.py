"""A run whose base is streamed is the run without it, bit for bit, on a card too small for the other."""

import gc
from functools import partial

import pytest
import torch
import transformers
from accelerate.state import AcceleratorState
from peft import PeftModel
from transformers.trainer_utils import get_last_checkpoint

from tests.models import checkpointing
from tests.streaming.lora import (
    LARGE,
    adapted,
    are_equal,
    base,
    learn,
    learned,
    losses,
    stream,
    trainer,
)
from trainer_plugins import StreamBase, stream_base
from trainer_plugins.streaming.stream import stream_of
from trainer_plugins.units import MIB

CHECKPOINTING = {
    "none": {},
    "reentrant": checkpointing(reentrant=True),
    "not reentrant": checkpointing(reentrant=False),
}


@pytest.mark.all(unless=lambda checkpointing: checkpointing == "not reentrant")
@pytest.mark.parametrize(
    ("checkpointing", "accumulation", "precision"),
    [("none", 1, {}), ("reentrant", 3, {}), ("not reentrant", 3, {"bf16": True})],
)
def test_the_same_weights_losses_and_evaluation(
    simgpu, tmp_path, checkpointing, accumulation, precision
) -> None:
    arguments = {
        "gradient_accumulation_steps": accumulation,
        **CHECKPOINTING[checkpointing],
        **precision,
    }
    torch.accelerator.reset_peak_memory_stats()
    resident = trainer(tmp_path, **arguments)
    resident.train()
    evaluation = resident.evaluate()["eval_loss"]
    expected = learned(resident)
    peak_bytes = torch.accelerator.max_memory_allocated()
    expected_losses = losses(resident)
    del resident
    gc.collect()
    torch.accelerator.reset_peak_memory_stats()

    streamed = trainer(tmp_path, StreamBase(), **arguments)
    layers = stream(streamed)
    streamed.train()

    assert layers.num_layers == 6
    # Forward brings all layers but those that stay, backward too; the first pass brings all.
    passes = 5 * accumulation
    assert layers.num_fetched == 2 * (6 - 2) * passes + 2
    assert losses(streamed) == expected_losses
    assert are_equal(learned(streamed), expected)
    saved_bytes = peak_bytes - torch.accelerator.max_memory_allocated()
    # In bf16 over a base in float32 the resident run may keep the casts of more layers, too.
    assert saved_bytes > 0.95 * (layers.num_bytes - layers.resident_bytes)
    assert streamed.evaluate()["eval_loss"] == evaluation


def in_fp16(folder, monkeypatch, *callbacks) -> transformers.Trainer:
    """accelerate takes the fp16 of known cards only: what it would set there is set here."""
    made = trainer(folder, *callbacks, gradient_accumulation_steps=2)
    monkeypatch.setitem(AcceleratorState._shared_state, "_mixed_precision", "fp16")
    made.accelerator.native_amp = True
    scaler = torch.amp.GradScaler("simgpu", init_scale=2.0**10, growth_interval=3)
    made.accelerator.scaler = scaler
    return made


@pytest.mark.all
def test_fp16_with_a_scaled_loss(simgpu, tmp_path, monkeypatch) -> None:
    resident = in_fp16(tmp_path, monkeypatch)
    dtypes = set()
    resident.model.base_model.model.lm_head.register_forward_hook(
        lambda module, args, output: dtypes.add(output.dtype)
    )
    resident.train()
    streamed = in_fp16(tmp_path, monkeypatch, StreamBase())
    streamed.train()

    assert dtypes == {torch.float16}
    assert stream(streamed).num_fetched == 2 * (6 - 2) * 5 * 2 + 2
    scales = {one.accelerator.scaler.get_scale() for one in (resident, streamed)}
    assert scales == {2.0**11}, "no step was passed over, and it grew once"
    assert are_equal(learned(streamed), learned(resident))
    assert losses(streamed) == losses(resident)


def test_generating_saving_loading_and_merging(simgpu, tmp_path) -> None:
    prompt = torch.arange(1, 9)[None]
    runs = {}
    for name, callbacks in (("resident", ()), ("streamed", (StreamBase(1),))):
        trained = trainer(tmp_path / name, *callbacks)
        trained.train()
        trained.save_model(str(tmp_path / name / "adapter"))
        model = trained.model.eval()
        ids = prompt.to("simgpu")
        runs[name] = {
            "words": model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=5
            ).cpu(),
            "state": {key: value.cpu().clone() for key, value in model.state_dict().items()},
            "loaded": PeftModel.from_pretrained(base(), tmp_path / name / "adapter").state_dict(),
        }
        torch.save(model.state_dict(), tmp_path / name / "whole.pt")
        runs[name]["file"] = torch.load(tmp_path / name / "whole.pt", map_location="cpu")
        assert (stream_of(model) is not None) == (name == "streamed")
        runs[name]["merged"] = {
            key: value.cpu() for key, value in model.merge_and_unload().state_dict().items()
        }
        del model, trained
    assert torch.equal(runs["resident"].pop("words"), runs["streamed"].pop("words"))
    for what, expected in runs["resident"].items():
        assert are_equal(runs["streamed"][what], expected), what


def test_a_checkpoint_is_resumed_from(simgpu, tmp_path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 3}
    results = []
    for name, callbacks in (("resident", []), ("streamed", [StreamBase])):
        first = trainer(tmp_path / name, *(each() for each in callbacks), **saving)
        first.args.max_steps = 3
        first.train()
        del first
        second = trainer(tmp_path / name, *(each() for each in callbacks), **saving)
        second.train(resume_from_checkpoint=get_last_checkpoint(str(tmp_path / name)))
        assert second.state.global_step == 5
        results.append(learned(second))
        del second

    assert are_equal(*results)


def test_a_base_that_does_not_fit_trains(simgpu, tmp_path) -> None:
    simgpu.set_capacity(18 * MIB)
    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        trainer(tmp_path, model=adapted(base(**LARGE)))

    lean = CHECKPOINTING["not reentrant"]
    trained = trainer(tmp_path, StreamBase(), model=adapted(base(**LARGE)), **lean)
    trained.train()

    assert trained.state.global_step == 5
    assert stream(trained).num_bytes > 32 * MIB
    assert torch.accelerator.max_memory_reserved() <= 18 * MIB


def test_only_if_it_is_needed(simgpu, tmp_path, caplog) -> None:
    roomy = trainer(tmp_path, StreamBase(when="needed"))
    assert stream_of(roomy.model) is None
    del roomy
    gc.collect()
    torch.accelerator.empty_cache()
    simgpu.set_capacity(18 * MIB)

    lean = CHECKPOINTING["not reentrant"]
    small = trainer(tmp_path, StreamBase(when="needed"), model=adapted(base(**LARGE)), **lean)

    assert "out of memory" in caplog.text
    assert "waits in main memory; 2 of them are on the card" in caplog.text
    assert stream(small).num_layers == 12
    assert small.train().global_step == 5


def test_a_model_that_was_loaded_to_main_memory(simgpu, tmp_path) -> None:
    base().save_pretrained(tmp_path / "base")
    load = partial(transformers.AutoModelForCausalLM.from_pretrained, tmp_path / "base")
    expected = learn(trainer(tmp_path / "run", model=adapted(load())))
    loaded = load(device_map="cpu")
    streamed = trainer(tmp_path / "run", StreamBase(), model=adapted(loaded))
    streamed.train()

    assert getattr(loaded, "hf_device_map", {"": 0}) == {"": 0}  # older transformers set it
    assert {one.device.type for one in streamed.model.parameters()} == {"simgpu"}
    assert are_equal(learned(streamed), expected)


@pytest.mark.parametrize("tied", [False, True])
def test_embeddings_and_head_too(simgpu, tmp_path, tied) -> None:
    sizes = {"vocab_size": 2048, "tie_word_embeddings": tied}
    resident = trainer(tmp_path, model=adapted(base(**sizes)))
    resident.train()
    expected, evaluation = learned(resident), resident.evaluate()["eval_loss"]
    del resident

    streamed = trainer(tmp_path, StreamBase(1, with_embeddings=True), model=adapted(base(**sizes)))
    layers = stream(streamed)
    streamed.train()

    assert layers.num_layers == 6 + (0 if tied else 2)
    assert are_equal(learned(streamed), expected)
    assert streamed.evaluate()["eval_loss"] == evaluation


def test_it_ends_and_the_card_has_the_base_again(simgpu, tmp_path) -> None:
    running = trainer(tmp_path)
    resident_bytes = torch.accelerator.memory_allocated()
    before = {name: value.cpu() for name, value in running.model.state_dict().items()}

    with stream_base(running, resident_layers=1) as layers:
        assert torch.accelerator.memory_allocated() < resident_bytes - 0.9 * layers.num_bytes
        running.evaluate()

    assert torch.accelerator.memory_allocated() == pytest.approx(resident_bytes, rel=0.01)
    assert stream_of(running.model) is None
    assert {type(one) for one in running.model.parameters()} == {torch.nn.Parameter}
    assert are_equal(running.model.state_dict(), before)
    assert running.train().global_step == 5


def test_what_cannot_be_streamed_is_said_and_nothing_is_moved(simgpu, tmp_path, caplog) -> None:
    full = trainer(tmp_path, StreamBase(), model=base())
    full.train()
    assert stream_of(full.model) is None
    assert caplog.text.count("none of its 6 layers has frozen weights") == 1
    with pytest.raises(ValueError, match="from 1 to 6, got 7"):
        stream_base(trainer(tmp_path), resident_layers=7)
    flat = trainer(tmp_path, model=adapted(base(num_hidden_layers=1)))
    with pytest.raises(ValueError, match="no repeated layers"):
        stream_base(flat)
    once = trainer(tmp_path, StreamBase())
    with pytest.raises(ValueError, match="already streamed"):
        stream_base(once)
    compiled = adapted()
    compiled.base_model.model.lm_head.compile()
    with pytest.raises(ValueError, match="parts of the model are compiled"):
        trainer(tmp_path, StreamBase(on_refusal="error"), model=compiled)
    with pytest.raises(ValueError, match="'always' or 'needed'"):
        StreamBase(when="sometimes")
