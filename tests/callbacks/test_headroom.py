"""What is outside torch's allocator finds room on the card, in a training whose cache would fill it."""

import pytest
import torch

from tests.events import at, takes
from trainer_plugins import Headroom
from trainer_plugins.units import MIB

CACHES = at("step_begin", takes(90, 110))  # of these sizes neither serves the other


def test_buffers_outside_torch_find_room(make_trainer, simgpu) -> None:
    def communicate(_) -> None:
        """Take 64 MiB of the card beside torch, as NCCL takes buffers."""
        if simgpu.card().free_bytes < 64 * MIB:
            raise RuntimeError("NCCL error: Failed to CUDA calloc async 67108864 bytes")
        simgpu.card().hold(4242, 64 * MIB, "nccl")

    callbacks = (CACHES, at("step_end", communicate, 2))
    with pytest.raises(RuntimeError, match="NCCL error"):
        make_trainer(*callbacks, max_steps=3).train()
    torch.accelerator.empty_cache()

    trainer = make_trainer(*callbacks, Headroom(leave_fraction=0.3), max_steps=3)
    trainer.train()
    assert trainer.state.global_step == 3
    assert torch.get_device_module("simgpu").get_per_process_memory_fraction() == 1.0


def test_the_limit_is_in_torchs_words_and_is_put_back_if_training_raises(
    make_trainer, simgpu
) -> None:
    torch.zeros(1, device="simgpu")
    torch.get_device_module("simgpu").set_per_process_memory_fraction(0.9)
    with pytest.raises(torch.OutOfMemoryError, match=r"76\.80 MiB allowed; Of the allocated"):
        make_trainer(CACHES, Headroom(leave_fraction=0.7)).train()

    assert torch.get_device_module("simgpu").get_per_process_memory_fraction() == 0.9
    torch.get_device_module("simgpu").set_per_process_memory_fraction(1.0)
    torch.zeros(200 * MIB, dtype=torch.uint8, device="simgpu")
