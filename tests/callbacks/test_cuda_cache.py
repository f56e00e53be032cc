"""Cached memory is released on evidence, at the interval, with its price; never because a stranger presses."""

import torch

from tests.events import at, takes
from tests.said_device import SaidDevice
from trainer_plugins import CudaCacheCallback
from trainer_plugins.devices.accelerator import open_device
from trainer_plugins.record.timeline import Flush, Timeline
from trainer_plugins.units import GIB, MIB


def flushes(make_trainer, mib: int, *more, steps: int = 8, **settings) -> list[Flush]:
    """Each step leaves some MiB in the allocator's cache, as a long batch does."""
    timeline = Timeline()
    fill = at("step_begin", takes(mib))
    callbacks = (fill, *more, CudaCacheCallback(**settings, timeline=timeline))
    make_trainer(*callbacks, max_steps=steps).train()
    return [entry for entry in timeline if isinstance(entry, Flush)]


def test_releases_at_the_interval_when_there_is_enough(make_trainer, simgpu) -> None:
    found = flushes(make_trainer, 64, interval=3)

    assert [flush.step for flush in found] == [3, 6]
    assert all(flush.released_bytes >= 64 * MIB and 0 < flush.seconds < 1 for flush in found)
    assert torch.accelerator.memory_reserved() >= 64 * MIB  # steps 7 and 8 cached again


def test_keeps_the_cache_when_there_is_little(make_trainer, simgpu) -> None:
    assert flushes(make_trainer, 8, interval=1) == []
    assert flushes(make_trainer, 64, interval=1, min_reclaimable_fraction=0.9) == []


def test_releases_on_schedule_when_asked_to(make_trainer, simgpu) -> None:
    found = flushes(make_trainer, 8, interval=4, min_reclaimable_fraction=0)

    assert [flush.step for flush in found] == [4, 8]


def test_holds_the_cache_while_a_foreign_process_grows(make_trainer, simgpu) -> None:
    def intrude(now) -> None:
        simgpu.card().hold(4242, 20 * MIB * (now.state.global_step - 3), "python infer.py")

    found = flushes(make_trainer, 64, at("step_begin", intrude, 4, 5, 6, 7), interval=1)

    assert [flush.step for flush in found] == [1, 2, 3, 4]
    assert torch.accelerator.memory_reserved() >= 64 * MIB


def test_a_run_on_the_cpu_has_nothing_to_release(make_trainer) -> None:
    assert flushes(make_trainer, 64, interval=1) == []


def test_what_comes_once_outside_torch_holds_only_for_a_while(make_trainer, simgpu) -> None:
    def communicate(_) -> None:
        simgpu.card().hold(4242, 30 * MIB, "buffers of the first collective")

    found = flushes(make_trainer, 64, at("step_begin", communicate, 10), interval=10, steps=80)

    assert [flush.step for flush in found] == [10, 70, 80]


def test_a_release_that_fails_is_said_once_and_training_goes_on(
    make_trainer, simgpu, caplog
) -> None:
    class Failing:
        name = "failing:0"

        def __init__(self, reads: bool) -> None:
            self.inner, self.reads = open_device("simgpu"), reads

        def read(self):
            if not self.reads:
                raise RuntimeError("the card fell off the bus")
            return self.inner.read()

        def release_cached(self):
            raise RuntimeError("the driver hangs")

    for reads in (True, False):
        caplog.clear()
        assert flushes(make_trainer, 64, interval=1, device=Failing(reads)) == []
        assert caplog.text.count("CudaCacheCallback failed; training continues") == 1


def test_a_cache_is_held_on_a_card_and_main_memory_is_nobodys_reservation(
    make_trainer, caplog
) -> None:
    card, host = SaidDevice("cuda:0"), SaidDevice("cpu")
    for device in card, host:

        def take_outside_torch(_, device=device) -> None:
            device.non_torch_bytes += GIB

        caplog.clear()
        with caplog.at_level("INFO", logger="trainer_plugins"):
            callback = CudaCacheCallback(
                interval=1, min_reclaimable_fraction=0, device=device, timeline=Timeline()
            )
            make_trainer(at("step_begin", take_outside_torch), callback).train()
        is_held = any(
            "holding the cache, memory outside torch grew" in record.message
            for record in caplog.records
        )
        assert is_held is (device is card)
    assert (card.num_releases, host.num_releases) == (0, 8)
