"""A base of 4 bits is streamed with its scales, bit for bit; one of 8 bits stays on the card."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from tests.streaming.lora import adapted, are_equal, base, learned, rows, trainer
from tests.streaming.test_training import CHECKPOINTING
from trainer_plugins import StreamBase
from trainer_plugins.streaming.attach import model_refusals
from trainer_plugins.streaming.layers import find_repeated_layers
from trainer_plugins.streaming.stream import Stream, stream_of

bitsandbytes = pytest.importorskip("bitsandbytes")
CARD = torch.device("simgpu:0")


@pytest.fixture(autouse=True)
def _kernels_are_not_compiled() -> Iterator[None]:
    """On the simulated card those in plain torch are used, and Inductor knows no such device.

    The tables that bitsandbytes keeps there for all layers go with the test.
    """
    with torch._dynamo.config.patch(disable=True):
        yield
    getattr(bitsandbytes.backends.utils, "_code_4bit_cache", {}).clear()
    bitsandbytes.functional.name2qmap.clear()


def four_bits(linear: nn.Linear, doubly: bool) -> nn.Module:
    made = bitsandbytes.nn.Linear4bit(
        linear.in_features,
        linear.out_features,
        bias=False,
        compute_dtype=torch.float32,
        quant_type="nf4",
    )
    made.weight = bitsandbytes.nn.Params4bit(
        linear.weight.data, compress_statistics=doubly, quant_type="nf4", module=made
    )
    return made


def eight_bits(linear: nn.Linear) -> nn.Module:
    made = bitsandbytes.nn.Linear8bitLt(
        linear.in_features, linear.out_features, bias=False, has_fp16_weights=False
    )
    made.weight = bitsandbytes.nn.Int8Params(
        linear.weight.data, requires_grad=False, has_fp16_weights=False
    )
    return made


def quantised(make, device="cpu") -> Any:
    """LoRA on a base that is quantised on a device, in main memory unless told otherwise."""
    model = base(attention_dropout=0.0, num_hidden_layers=3)
    for layer in find_repeated_layers(model):
        for name, part in list(layer.named_modules()):
            if isinstance(part, nn.Linear):
                layer.set_submodule(name, make(part).to(device))
    return adapted(model)


def step(model: nn.Module) -> dict[str, torch.Tensor]:
    torch.manual_seed(5)
    model.zero_grad()
    batch = {name: torch.stack([row[name] for row in rows(2)]).to(CARD) for name in rows(1)[0]}
    loss = model(**batch).loss
    loss.backward()
    learned = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    assert learned
    return {"loss": loss.detach(), **{name: one.clone() for name, one in learned.items()}}


@pytest.mark.parametrize("resident_layers", [1, 2])
@pytest.mark.parametrize("use_reentrant", [None, True, False])
@pytest.mark.parametrize("doubly", [False, True], ids=["nf4", "nf4 twice"])
def test_four_bits(simgpu, tmp_path, doubly, use_reentrant, resident_layers) -> None:
    expected, model = (quantised(lambda linear: four_bits(linear, doubly)) for _ in range(2))
    for one in (expected, model):
        if use_reentrant is not None:
            one.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
            one.enable_input_require_grads()
        one.train()
    nn.Module.to(expected, CARD)

    stream = Stream(model, CARD, resident_layers)

    matrices = 4 * 128 * 128 - 2 * 128 * 64 + 3 * 128 * 352  # half of the heads have keys
    scales = matrices // 64 * (1 if doubly else 4)
    assert stream.num_bytes == 3 * (matrices // 2 + scales)
    for _ in range(2):
        assert are_equal(step(model), step(expected))
    assert stream.num_fetched > 3
    assert are_equal(model.state_dict(), expected.state_dict())
    torch.save(model.state_dict(), tmp_path / "whole.pt")
    assert are_equal(torch.load(tmp_path / "whole.pt", map_location=CARD), expected.state_dict())
    assert are_equal(step(copy.deepcopy(model)), step(expected))
    if resident_layers == 1:
        stream.remove()
    else:
        nn.Module.cpu(model)
        assert stream_of(model) is None
        nn.Module.to(model, CARD)
    assert are_equal(step(model), step(expected))


def test_eight_bits_stay(simgpu) -> None:
    expected, model = (quantised(eight_bits, CARD) for _ in range(2))
    assert any("is in int8 of bitsandbytes" in said for said in model_refusals(model, 1))

    down = model.base_model.model.model.layers  # a base of which some is not quantised
    for layer in down:
        layer.mlp.down_proj = nn.Linear(352, 128, bias=False).requires_grad_(False)
    for mine, theirs in zip(down, expected.base_model.model.model.layers, strict=True):
        theirs.mlp.down_proj = copy.deepcopy(mine.mlp.down_proj)
    nn.Module.to(expected, CARD)
    stream = Stream(model, CARD, 1)

    assert stream.num_bytes == 3 * 352 * 128 * 4
    assert are_equal(step(model), step(expected))


def loaded(folder: Path) -> Any:
    """As transformers loads a base in 4 bits, to main memory; with LoRA."""
    return adapted(
        transformers.LlamaForCausalLM.from_pretrained(
            folder,
            device_map="cpu",
            quantization_config=transformers.BitsAndBytesConfig(
                load_in_4bit=True,
                bnb_4bit_quant_type="nf4",
                bnb_4bit_use_double_quant=True,
                bnb_4bit_compute_dtype=torch.float32,
            ),
        )
    )


def test_transformers_loads_it(simgpu, tmp_path) -> None:
    base().save_pretrained(tmp_path)
    expected, model = (loaded(tmp_path).eval() for _ in range(2))
    nn.Module.to(expected, CARD)
    stream = Stream(model, CARD, 2)

    assert stream.num_layers == 6
    assert are_equal(step(model), step(expected))


@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
def test_the_trainer_trains_it(simgpu, tmp_path, checkpointing) -> None:
    base().save_pretrained(tmp_path / "base")
    how = {"gradient_accumulation_steps": 2, **CHECKPOINTING[checkpointing]}
    on_card = loaded(tmp_path / "base")
    nn.Module.to(on_card, CARD)  # the Trainer leaves a quantised model where it is
    resident = trainer(tmp_path, model=on_card, **how)
    resident.train()
    streamed = trainer(tmp_path, StreamBase(), model=loaded(tmp_path / "base"), **how)
    layers = stream_of(streamed.model)
    streamed.train()

    assert layers is not None
    assert layers.num_fetched == 2 * (6 - 2) * 5 * 2 + 2
    assert are_equal(learned(streamed), learned(resident))
    assert streamed.evaluate()["eval_loss"] == resident.evaluate()["eval_loss"]
