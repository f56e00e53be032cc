"""torch.compile: a compiled model is divided with the same gradients, and stays compiled."""

from collections.abc import Iterator

import pytest
import torch
from accelerate.state import AcceleratorState
from transformers import TrainerCallback

from tests.models import tiny_llama
from tests.survival.failing import Gradients, off_by, ragged_rows, small_trainer
from tests.survival.test_contrastive import clip
from trainer_plugins import survive_oom

WHOLE = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
STEPS = {"steps": 3, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 2}
CASES = {
    "whole, forward": (True, None, "forward"),
    "whole, fixed shapes": (True, False, "forward"),
    "layers, half way in backward": (False, None, "backward"),
    "layers, dynamic shapes": (False, True, "backward"),
    "layers, fixed shapes": (False, False, "forward"),
    "whole, nothing but checkpointing helps": (True, None, "not checkpointing"),
}


class Card(TrainerCallback):
    """On which three rows fit at once, or none without checkpointing.

    An error is raised where no code is compiled; a mode that counts allocations would leave all of
    it uncompiled.
    """

    def __init__(self, trainer, where: str) -> None:
        self.trainer, self.where = trainer, where

    def on_train_begin(self, args, state, control, **kwargs):
        wrapped, model = self.trainer.model_wrapped, self.trainer.model
        if self.where == "backward":
            model.model.layers[0].register_forward_hook(self.in_backward)
        else:
            wrapped.register_forward_pre_hook(self.in_forward, with_kwargs=True)

    def in_forward(self, wrapped, args, inputs):
        is_too_much = len(inputs["input_ids"]) > 3
        if self.where == "not checkpointing":
            is_too_much = not self.trainer.model.is_gradient_checkpointing
        if wrapped.training and torch.is_grad_enabled() and is_too_much:
            self.fail()

    def in_backward(self, layer, args, output):
        if output.requires_grad and len(output) > 3:
            output.register_hook(self.fail)

    def fail(self, *_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")


@pytest.fixture(autouse=True)
def _compile_for_one_test_only(monkeypatch) -> Iterator[None]:
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "no")
    AcceleratorState._reset_state(reset_partial_state=True)
    torch._dynamo.reset()
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    torch._dynamo.reset()


def made(folder, *, whole: bool = False, **options):
    model = tiny_llama().double()
    options = {**STEPS, **(WHOLE if whole else {}), **options}
    trainer = small_trainer(folder, model, train_dataset=ragged_rows(64), **options)
    gradients: list = []
    trainer.add_callback(Gradients(gradients))
    return trainer, gradients


@pytest.mark.all
@pytest.mark.parametrize("case", CASES)
def test_pieces_add_up_and_are_compiled(tmp_path, caplog, case: str) -> None:
    plain, expected = made(tmp_path / "plain")
    plain.train()
    is_whole, dynamic, where = CASES[case]
    trainer, gradients = made(tmp_path / "divided", whole=is_whole)
    if is_whole:
        trainer.accelerator.state.dynamo_plugin.dynamic = dynamic
    else:
        for layer in trainer.model.model.layers:
            layer.compile(backend="aot_eager", dynamic=dynamic)
    trainer.add_callback(Card(trainer, where))
    survive_oom(trainer)

    trainer.train()

    assert type(trainer.model_wrapped).__name__ == (
        "OptimizedModule" if is_whole else "LlamaForCausalLM"
    )
    assert max(map(off_by, gradients, expected)) <= 1e-13
    assert len(gradients) == len(expected) == 3
    survived = [line for line in caplog.text.splitlines() if "out-of-memory-survived" in line]
    assert survived
    # Without checkpointing the whole does not fit, and then not one row.
    attempts = "2 failed attempts" if where == "not checkpointing" else "1 failed attempt,"
    assert attempts in survived[0]
    # Not one graph would be left if what survival measures had been intercepted in compiled code.
    assert "torch.compile compiled" in survived[0]


def test_a_loss_that_compares_rows_is_refused(tmp_path) -> None:
    trainer = small_trainer(tmp_path, clip(), **WHOLE)
    with pytest.raises(
        ValueError, match="its loss compares rows, and compiled code cannot pass them in pieces"
    ):
        survive_oom(trainer)


def test_cuda_graphs_and_compiled_autograd_are_refused(tmp_path) -> None:
    trainer, _ = made(tmp_path, whole=True, torch_compile_mode="reduce-overhead")
    with pytest.raises(ValueError, match="mode='reduce-overhead' keeps the memory of CUDA graphs"):
        survive_oom(trainer)

    trainer.accelerator.state.dynamo_plugin.mode = "default"
    with (
        torch._dynamo.config.patch(compiled_autograd=True),
        pytest.raises(ValueError, match="compiled_autograd hides which gradients"),
    ):
        survive_oom(trainer)
