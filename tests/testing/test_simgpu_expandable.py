"""Segments that grow, by what torch.accelerator reports: they do what the model of CUDA's allocator does."""

import random
from typing import Any

import pytest

from tests.testing.test_simgpu import SMALL_REPORT, _needs_simgpu, facts, run  # noqa: F401
from trainer_plugins.allocator.model import AllocatorFull, AllocatorModel, AllocatorRules
from trainer_plugins.units import MIB

CAPACITY = 160 * MIB

STORY = """
import ctypes

def ends(tensor):  # the card's memory is the host's
    return [ctypes.c_ubyte.from_address(tensor.data_ptr() + at) for at in (0, tensor.numel() - 1)]

held, told = {}, []
for number, (what, size) in enumerate(SCRIPT):
    failed = False
    if what == "take":
        try:
            held[number] = torch.empty(size, dtype=torch.uint8, device="simgpu")
            for end in ends(held[number]):
                end.value = number % 251
        except torch.OutOfMemoryError:
            failed = True
    elif what == "drop":
        if size in held:
            tensor = held.pop(size)
            assert [end.value for end in ends(tensor)] == [size % 251] * 2
            del tensor
    else:
        torch.accelerator.empty_cache()
    stats = torch.accelerator.memory_stats()
    told.append([failed, stats["allocated_bytes.all.current"], stats["reserved_bytes.all.current"],
                 stats["num_alloc_retries"]])
held.clear()
torch.accelerator.empty_cache()
report(told=told, left=torch.accelerator.memory_reserved(), used=simgpu.card().used_bytes,
       splits=torch.accelerator.memory_stats()["inactive_split.all.peak"])
"""


def script(seed: int) -> list[tuple[str, int]]:
    """Takes, drops and empties, so that the card is full now and then."""
    chance, done, alive = random.Random(seed), [], []
    for number in range(600):
        kind = chance.random()
        if kind < 0.55:
            small = chance.random() < 0.5
            size = chance.randint(1, MIB) if small else chance.randint(MIB, 24 * MIB)
            alive.append(number)
            done.append(("take", size))
        elif kind < 0.98 and alive:
            done.append(("drop", alive.pop(chance.randrange(len(alive)))))
        else:
            done.append(("empty", 0))
    return done


def by_the_model(steps: list[tuple[str, int]]) -> list[list[Any]]:
    model = AllocatorModel(CAPACITY, AllocatorRules(expandable_segments=True))
    held: dict[int, Any] = {}
    told = []
    for number, (what, size) in enumerate(steps):
        failed = False
        if what == "take":
            try:
                held[number] = model.malloc(size)
            except AllocatorFull:
                failed = True
        elif what == "drop" and size in held:
            model.free(held.pop(size))
        elif what == "empty":
            model.empty_cache()
        told.append([failed, model.allocated_bytes, model.reserved_bytes, model.num_retries])
    return told


@pytest.mark.parametrize("seed", range(3))
def test_what_grows_is_what_the_model_says(tmp_path, seed: int) -> None:
    steps = script(seed)
    story = f"SCRIPT = {steps}\n" + STORY
    process = run(
        tmp_path,
        story,
        capacity="160MiB",
        prelude=SMALL_REPORT,
        env={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
    )
    (found,) = facts(process)
    expected = by_the_model(steps)
    assert found["told"] == expected
    assert sum(failed for failed, *_ in expected) > 5
    assert found["left"] == found["used"] == found["splits"] == 0


def test_pages_of_a_tensor_between_two_come_back_and_without_the_setting_they_do_not(
    tmp_path,
) -> None:
    story = """
    held = [fill(30) for _ in range(5)]
    del held[::2]
    torch.accelerator.empty_cache()
    report(reserved=torch.accelerator.memory_reserved(), big=out_of_memory(40) is None)
    """
    reserved = {}
    for text in ("expandable_segments:True", "expandable_segments:False", "max_split_size_mb:64"):
        env = {"PYTORCH_CUDA_ALLOC_CONF": text}
        process = run(tmp_path, story, capacity="160MiB", prelude=SMALL_REPORT, env=env)
        (found,) = facts(process)
        reserved[text] = found["reserved"]
        assert found["big"]
    assert [*reserved.values()] == [80 * MIB, 60 * MIB, 60 * MIB]
