"""Architectures of every make: a step with a streamed base is the step without it, bit for bit."""

from typing import Any

import pytest
import torch
import transformers
from torch import nn

from tests.models import IS_OLD
from tests.survival.classes.batches import batch_for
from tests.survival.classes.tiny import tiny_model
from trainer_plugins.streaming.layers import find_repeated_layers
from trainer_plugins.streaming.stream import Stream

CARD = torch.device("simgpu:0")
FAMILIES = (
    *("LlamaForCausalLM", "Qwen3ForCausalLM", "MistralForCausalLM", "Gemma3ForCausalLM"),
    *("PhiForCausalLM", "GPT2LMHeadModel", "OPTForCausalLM", "T5ForConditionalGeneration"),
    *("BertForMaskedLM", "WhisperForConditionalGeneration", "LlavaForConditionalGeneration"),
    *("MixtralForCausalLM", "MambaForCausalLM", "ViTForImageClassification"),
)
MODES = (None, {"use_reentrant": True}, {"use_reentrant": False})


def frozen(name: str, checkpointing: dict[str, bool] | None) -> nn.Module:
    """All matrices of the layers are frozen; norms, embeddings and heads learn."""
    model: Any = tiny_model(getattr(transformers, name))
    for layer in find_repeated_layers(model):
        for weight in layer.parameters():
            weight.requires_grad_(weight.ndim == 1)
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.1
    if checkpointing is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=checkpointing)
        model.enable_input_require_grads()
    return model.train()


def steps(model: nn.Module) -> list[torch.Tensor]:
    """Two steps of AdamW: their losses, and what was learned."""
    learning = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(learning, lr=1e-3)
    batch = batch_for(model, labels_at_padding=False)
    losses = []
    for step in range(2):
        torch.manual_seed(step)
        loss = model(**{name: value.to(CARD) for name, value in batch.items()}).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().cpu())
    return [*losses, *(weight.detach().cpu() for weight in learning)]


@pytest.mark.parametrize("checkpointing", MODES, ids=["plain", "reentrant", "not reentrant"])
@pytest.mark.parametrize("name", FAMILIES)
def test_the_same_steps(simgpu, name, checkpointing) -> None:
    if (
        checkpointing is not None
        and not getattr(transformers, name).supports_gradient_checkpointing
    ):
        pytest.skip("it has no checkpointing")
    if IS_OLD and name.startswith("Whisper") and checkpointing == {"use_reentrant": True}:
        pytest.skip("transformers 4.57 cannot train it so without us either")
    expected = steps(frozen(name, checkpointing).to(CARD))

    model = frozen(name, checkpointing)
    stream = Stream(model, CARD, 1)
    got = steps(model)

    assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))
    # Each of the four passes brings one layer of two at least; pictures are not looked at here.
    assert stream.num_fetched >= 4 + 1
