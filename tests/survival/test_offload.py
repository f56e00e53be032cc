"""One long row that does not fit with checkpointing either: what the backward pass needs waits in main memory."""

import gc
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.survival.failing import small_trainer
from tests.survival.test_attach import remarks
from trainer_plugins import survive_oom
from trainer_plugins.survival.limit.ladder import Offload
from trainer_plugins.units import MIB

CHECKPOINTING, BOTH = ("checkpointing",), ("checkpointing", "offload")


def deep_and_mostly_frozen() -> LlamaForCausalLM:
    """Its activations are larger than its weights, gradients and optimizer states."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 48}
    model = LlamaForCausalLM(
        LlamaConfig(**sizes, num_attention_heads=2, use_cache=False, tie_word_embeddings=True)
    )
    model.requires_grad_(False)
    for layer in model.model.layers:
        layer.input_layernorm.weight.requires_grad_()
    return model


def trained(
    folder: Path, simgpu, capacity_mib: int, **options
) -> tuple[LlamaForCausalLM, list[torch.Tensor]]:
    """The model, and its weights, after two steps of one row of 512 tokens each."""
    gc.collect()
    torch.accelerator.empty_cache()
    simgpu.set_capacity(capacity_mib * MIB)
    generator = torch.Generator().manual_seed(1)
    rows = [{"input_ids": torch.randint(1, 64, (512,), generator=generator)} for _ in range(8)]
    trainer = small_trainer(
        folder,
        deep_and_mostly_frozen(),
        train_dataset=rows,
        use_cpu=False,
        steps=2,
        optim="sgd",
        per_device_train_batch_size=1,
    )
    if options:
        with survive_oom(trainer, **options):
            trainer.train()
    else:
        trainer.train()
    assert trainer.model.device.type == "simgpu"
    return trainer.model, [parameter.detach().cpu() for parameter in trainer.model.parameters()]


@pytest.mark.parametrize("plan_first", [True, False])
@pytest.mark.all(but=1)
def test_a_row_that_fits_in_no_other_way(tmp_path, simgpu, plan_first: bool) -> None:
    _, expected = trained(tmp_path / "large", simgpu, 256)
    model, weights = trained(tmp_path / "small", simgpu, 6, ladder=BOTH, plan_first=plan_first)

    torch.testing.assert_close(weights, expected, rtol=0, atol=0)
    (told, *_) = remarks(
        tmp_path / "small", "out-of-memory-" + ("foreseen" if plan_first else "survived")
    )
    assert "offload" in told.finding.summary
    assert not model._forward_hooks, "detached, nothing of it is left"
    assert not model._forward_pre_hooks


def test_without_it_the_row_does_not_fit(tmp_path, simgpu) -> None:
    with pytest.raises(torch.OutOfMemoryError, match="nothing left to switch on"):
        trained(tmp_path, simgpu, 6, ladder=CHECKPOINTING, plan_first=False)


def test_little_stays_on_the_card_between_forward_and_backward(simgpu) -> None:
    gc.collect()
    torch.accelerator.empty_cache()
    simgpu.set_capacity(256 * MIB)
    model = deep_and_mostly_frozen().to("simgpu")
    ids = torch.randint(1, 64, (1, 512), device="simgpu")

    def kept_bytes() -> int:
        before = torch.accelerator.memory_allocated()
        loss = model(input_ids=ids, labels=ids).loss
        kept = torch.accelerator.memory_allocated() - before
        loss.backward()
        return kept

    on_card = kept_bytes()
    offload = Offload(model)
    on_host = kept_bytes()
    offload.close()

    assert on_host < on_card / 20
    assert kept_bytes() == on_card


def test_a_model_in_main_memory_has_nowhere_to_go() -> None:
    assert not Offload.is_possible(deep_and_mostly_frozen())
