"""Counters and errors of simgpu's allocator. What it allocates and reserves, the model says (test_allocator_model)."""

# the fixture skips here too
from tests.testing.test_simgpu import SMALL_REPORT, _needs_simgpu, facts, run  # noqa: F401
from trainer_plugins.units import MIB

STORY = """
import threading

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
small, a, b = block(513), block(4 * MIB), block(4 * MIB)
told["three"] = now()
address = a.data_ptr()
del a
told["a hole"] = now()
c = block(3 * MIB)
told["best fit"] = c.data_ptr() == address
del b, c, small
told["merged"] = now()
torch.accelerator.empty_cache()
told["emptied"] = now()

# Under pressure: the cache goes back, the retry is counted, and only then it is an error.
simgpu.set_capacity(64 * MIB)
b = block(50 * MIB)
told["error"] = out_of_memory(20)
told["failed"] = now()
del b
torch.accelerator.reset_peak_memory_stats()
told["peak"] = torch.accelerator.max_memory_allocated()
torch.accelerator.reset_accumulated_memory_stats()
told["forgotten"] = now()

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


def test_what_torch_counts_of_it(tmp_path):
    (found,) = facts(run(tmp_path, STORY, prelude=SMALL_REPORT))
    told = found["told"]
    three, emptied = told["three"], told["emptied"]
    assert (three["requested"], three["allocated"]) == (8 * MIB + 513, 8 * MIB + 1024)
    assert (three["small"], three["reserved"], three["segments"]) == (2 * MIB, 22 * MIB, 2)
    assert (three["splits"], three["split_bytes"]) == (2, 14 * MIB - 1024)
    assert (told["a hole"]["splits"], told["a hole"]["split_bytes"]) == (3, 18 * MIB - 1024)
    assert told["best fit"] is True
    assert (told["merged"]["splits"], told["merged"]["reserved"]) == (0, 22 * MIB)
    assert (emptied["allocated"], emptied["reserved"], emptied["segments"]) == (0, 0, 0)
    assert emptied["made"] == emptied["given_back"] == 2
    assert (told["failed"]["ooms"], told["failed"]["retries"]) == (1, 1)
    for words in (
        "Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 64.00 MiB of which 14.00 MiB is free.",
        "Of the allocated memory 50.00 MiB is allocated by PyTorch, and 0 bytes is reserved",
    ):
        assert words in told["error"]
    assert told["peak"] == 0
    assert [told["forgotten"][name] for name in ("retries", "ooms", "made")] == [0, 0, 0]
    left = told["after threads"]
    assert left["reserved"] == left["allocated"] == told["used"] == 0, "eight threads at once"
