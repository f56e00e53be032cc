"""What every device promises.

The simulated card is held to the same promises as the card that it stands for.
"""

import copy
import gc
import mmap
import pickle

import pytest
import torch

from tests.conftest import CUDA
from trainer_plugins.devices import Device, HostDevice
from trainer_plugins.devices.accelerator import AcceleratorDevice, open_device
from trainer_plugins.reading import MemoryReading
from trainer_plugins.units import MIB


@pytest.fixture(params=["cpu", "simgpu", CUDA])
def place(request) -> str:
    if request.param == "simgpu":
        request.getfixturevalue("simgpu")
    return request.param


@pytest.fixture
def device(place: str) -> Device:
    device = open_device(place)
    gc.collect()
    device.release_cached()
    device.reset_peak()
    return device


def new_bytes(size: int, place: str) -> torch.Tensor:
    """Return a tensor in memory that this process did not hold before."""
    if place == "cpu":  # malloc would hand out what earlier tests gave back, which is resident
        return torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8).fill_(1)
    return torch.ones(size, dtype=torch.uint8, device=place)


def test_it_is_called_as_torch_calls_it(device: Device, place: str) -> None:
    assert torch.device(device.name).type == place
    assert device.read().device == device.name


def test_sizes_are_ordered(device: Device) -> None:
    reading = device.read()

    assert 0 <= reading.allocated_bytes <= reading.reserved_bytes <= reading.total_bytes
    assert 0 <= reading.free_bytes <= reading.total_bytes
    assert reading.allocated_bytes <= reading.peak_allocated_bytes
    assert 0 <= reading.pressure <= 1
    parts = (
        reading.non_torch_bytes
        + reading.allocated_bytes
        + reading.cached_bytes
        + reading.free_bytes
    )
    assert parts >= reading.total_bytes


def test_a_tensor_is_seen(device: Device, place: str) -> None:
    before = device.read()

    tensor = new_bytes(64 * MIB, place)
    during = device.read()

    assert during.allocated_bytes - before.allocated_bytes == pytest.approx(64 * MIB, rel=0.1)
    if place != "cpu":  # other processes give back main memory meanwhile
        assert during.free_bytes < before.free_bytes + 8 * MIB
    del tensor


def test_the_peak_remembers_until_it_is_reset(device: Device, place: str) -> None:
    before = device.read()
    new_bytes(64 * MIB, place).sum()

    assert device.read().peak_allocated_bytes - before.allocated_bytes > 48 * MIB
    device.reset_peak()
    assert device.read().peak_allocated_bytes - before.allocated_bytes < 48 * MIB


def test_releasing_gives_back_what_no_tensor_holds(device: Device, place: str) -> None:
    keep = torch.ones(32 * MIB, dtype=torch.uint8, device=place)
    torch.ones(64 * MIB, dtype=torch.uint8, device=place)
    before = device.read()

    released = device.release_cached()

    after = device.read()
    assert released >= 0
    assert after.reserved_bytes <= before.reserved_bytes
    if place != "cpu":
        assert released == before.reserved_bytes - after.reserved_bytes >= 60 * MIB
    assert int(keep.sum()) == 32 * MIB
    assert after.cached_bytes < 32 * MIB


def test_who_holds_memory_is_a_list_or_unknown(device: Device) -> None:
    processes = device.processes()

    assert processes is None or all(process.pid > 0 for process in processes)


@pytest.mark.parametrize("wrong", ["mps", "meta", "cuda:99"])
def test_a_device_that_is_not_here_is_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match=f"cannot read the memory of {wrong}"):
        open_device(wrong)


def test_a_card_beyond_the_last_is_refused(simgpu) -> None:
    num_cards = torch.accelerator.device_count()

    assert open_device(f"simgpu:{num_cards - 1}").name == f"simgpu:{num_cards - 1}"
    with pytest.raises(
        ValueError,
        match=f"cannot read the memory of simgpu:{num_cards}: there are only {num_cards} simgpu",
    ):
        open_device(f"simgpu:{num_cards}")


def test_what_is_opened(simgpu) -> None:
    assert isinstance(open_device("cpu"), HostDevice)
    card = open_device("simgpu")
    assert isinstance(card, AcceleratorDevice)
    assert card.read_allocated_bytes() == card.read().allocated_bytes
    assert open_device("simgpu:0") is card  # so that its driver's failures are said once


def test_memory_of_another_process_is_neither_free_nor_ours(simgpu) -> None:
    device = open_device("simgpu")
    before = device.read()

    simgpu.card().hold(4242, 100 * MIB, "python infer.py")

    after = device.read()
    assert (
        before.free_bytes - after.free_bytes
        == 100 * MIB
        == after.non_torch_bytes - before.non_torch_bytes
    )
    assert after.reserved_bytes == before.reserved_bytes


@pytest.mark.parametrize(
    "sizes", [{"total_bytes": 0}, {"total_bytes": -1}, {"free_bytes": 81}, {"allocated_bytes": -1}]
)
def test_numbers_that_cannot_be_are_no_reading(sizes: dict[str, int]) -> None:
    sound = {
        "total_bytes": 80,
        "free_bytes": 0,
        "reserved_bytes": 90,
        "allocated_bytes": 1,
        "peak_allocated_bytes": 1,
    }

    assert MemoryReading(device="cuda:0", **sound).non_torch_bytes == 0  # counted a moment apart
    with pytest.raises(ValueError, match="cuda:0 reports memory numbers that cannot be true"):
        MemoryReading(device="cuda:0", **{**sound, **sizes})


def test_a_copy_reads_too(device: Device) -> None:
    for twin in copy.deepcopy(device), pickle.loads(pickle.dumps(device)):
        assert twin.read().total_bytes == device.read().total_bytes


def test_an_accelerator_that_torch_does_not_count_is_refused(monkeypatch) -> None:
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda: torch.device("mps")
    )  # as on a Mac

    with pytest.raises(ValueError, match="cannot read the memory of mps: torch does not count it"):
        open_device("mps")
