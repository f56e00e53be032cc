"""What is outside torch's allocator finds room on the card, in a training whose cache would fill it."""

import pytest
import torch
from transformers import TrainerCallback

from trainer_plugins import Headroom
from trainer_plugins.units import MIB

STRANGER = 4242


class Caches(TrainerCallback):
    """Takes 100 MiB twice, one after the other, in sizes of which neither serves the other."""

    def on_step_begin(self, args, state, control, **kwargs):
        for mib in (90, 110):
            torch.zeros(mib * MIB, dtype=torch.uint8, device=args.device)


class Communicates(TrainerCallback):
    """Takes 64 MiB of the card beside torch at the end of the second step, as NCCL takes buffers."""

    def __init__(self, card) -> None:
        self.card = card

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 2:
            if self.card.free_bytes < 64 * MIB:
                raise RuntimeError("NCCL error: Failed to CUDA calloc async 67108864 bytes")
            self.card.hold(STRANGER, 64 * MIB, "nccl")


def test_buffers_outside_torch_find_room(make_trainer, simgpu) -> None:
    callbacks = (Caches(), Communicates(simgpu.card()))
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
        make_trainer(Caches(), Headroom(leave_fraction=0.7)).train()

    assert torch.get_device_module("simgpu").get_per_process_memory_fraction() == 0.9
    torch.get_device_module("simgpu").set_per_process_memory_fraction(1.0)
    torch.zeros(200 * MIB, dtype=torch.uint8, device="simgpu")
