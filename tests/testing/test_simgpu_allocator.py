"""The rules of CUDA's caching allocator, by what torch.accelerator reports.

One process tells all of it.
"""

import pytest

# the fixture skips here too
from tests.testing.test_simgpu import SMALL_REPORT, _needs_simgpu, facts, run  # noqa: F401
from trainer_plugins.units import KIB, MIB

STORY = """
def now():
    stats = torch.accelerator.memory_stats()
    return {name: stats.get(key + ".current", 0) for name, key in dict(
        allocated="allocated_bytes.all", requested="requested_bytes.all", reserved="reserved_bytes.all",
        segments="segment.all", small="reserved_bytes.small_pool", splits="inactive_split.all",
        split_bytes="inactive_split_bytes.all").items()} | dict(
        retries=stats["num_alloc_retries"], ooms=stats["num_ooms"], made=stats["num_device_alloc"],
        given_back=stats["num_device_free"])

def block(size):
    return torch.empty(size, dtype=torch.uint8, device="simgpu")

told = {}
for size in SIZES:
    held = block(size)
    told[size] = now()
    del held
    torch.accelerator.empty_cache()
told["emptied"] = now()

# Splitting: two in one segment, best fit, merging.
a, b = block(4 * MIB), block(4 * MIB)
told["two in one"] = now()
address = a.data_ptr()
del a
told["a hole"] = now()
c = block(3 * MIB)
told["best fit"] = c.data_ptr() == address
del b, c
told["merged"] = now()
torch.accelerator.empty_cache()

# A remainder of at most 1 MiB is not split off a large segment.
a = block(19 * MIB + 512)
told["no split"] = now()
del a
torch.accelerator.empty_cache()
told["capacity"] = torch.simgpu.mem_get_info()

# Under pressure: the cache goes back, the retry is counted, and only then it is an error.
simgpu.set_capacity(64 * MIB)
a = block(40 * MIB)
del a
told["before retry"] = now()
b = block(50 * MIB)
told["retried"] = now()
told["error"] = out_of_memory(20)
told["failed"] = now()
del b
torch.accelerator.reset_peak_memory_stats()
told["peak"] = torch.accelerator.max_memory_allocated()
torch.accelerator.reset_accumulated_memory_stats()
told["forgotten"] = now()

# Eight threads at once leave nothing behind.
import threading
def churn():
    for i in range(300):
        block((i * 7919) % 70000 + 1)
threads = [threading.Thread(target=churn) for _ in range(8)]
[t.start() for t in threads]
[t.join() for t in threads]
torch.accelerator.empty_cache()
told["after threads"] = now()
told["used"] = simgpu.card().used_bytes
report(told=told)
"""

ALLOCATED_AND_RESERVED = {  # bytes asked for: what is allocated, and the segment it comes from
    1: (512, 2 * MIB),
    512: (512, 2 * MIB),
    513: (1 * KIB, 2 * MIB),
    1 * MIB: (1 * MIB, 2 * MIB),
    1 * MIB + 1: (1 * MIB + 512, 20 * MIB),
    10 * MIB - 512: (10 * MIB - 512, 20 * MIB),
    10 * MIB: (10 * MIB, 10 * MIB),
    10 * MIB + 1: (12 * MIB, 12 * MIB),
    21 * MIB: (22 * MIB, 22 * MIB),
}


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    story = f"SIZES = {list(ALLOCATED_AND_RESERVED)}\n" + STORY
    (found,) = facts(run(tmp_path_factory.mktemp("allocator"), story, prelude=SMALL_REPORT))
    return found["told"]


@pytest.mark.parametrize("size", ALLOCATED_AND_RESERVED)
def test_sizes_are_rounded_and_come_from_segments(told, size):
    _, reserved = ALLOCATED_AND_RESERVED[size]
    seen = told[str(size)]
    assert seen["requested"] == size
    assert seen["reserved"] == reserved
    assert seen["segments"] == 1
    assert seen["small"] == (reserved if size <= MIB else 0)


def test_an_emptied_cache_holds_nothing(told):
    seen = told["emptied"]
    assert (seen["allocated"], seen["reserved"], seen["segments"], seen["splits"]) == (0, 0, 0, 0)
    assert seen["made"] == seen["given_back"] == len(ALLOCATED_AND_RESERVED)


def test_segments_are_split_and_merged(told):
    assert told["two in one"]["reserved"] == 20 * MIB
    assert (told["two in one"]["splits"], told["two in one"]["split_bytes"]) == (1, 12 * MIB)
    assert (told["a hole"]["splits"], told["a hole"]["split_bytes"]) == (2, 16 * MIB)
    assert told["best fit"] is True
    assert (
        told["merged"]["splits"],
        told["merged"]["split_bytes"],
        told["merged"]["reserved"],
    ) == (0, 0, 20 * MIB)
    assert (told["no split"]["allocated"], told["no split"]["splits"]) == (20 * MIB, 0)


def test_a_full_card_is_emptied_of_cache_before_it_fails(told):
    assert told["before retry"]["reserved"] == 40 * MIB
    assert told["retried"]["reserved"] == 50 * MIB
    assert told["retried"]["retries"] == told["before retry"]["retries"] + 1
    assert told["retried"]["ooms"] == 0
    assert told["failed"]["ooms"] == 1
    assert (
        "Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 64.00 MiB of which 14.00 MiB is free."
        in told["error"]
    )
    assert (
        "Of the allocated memory 50.00 MiB is allocated by PyTorch, and 0 bytes is reserved"
        in told["error"]
    )


def test_statistics_can_be_reset(told):
    assert told["peak"] == 0
    assert (told["forgotten"]["retries"], told["forgotten"]["ooms"], told["forgotten"]["made"]) == (
        0,
        0,
        0,
    )


def test_threads_leave_nothing_behind(told):
    assert (
        told["after threads"]["reserved"] == told["after threads"]["allocated"] == told["used"] == 0
    )
