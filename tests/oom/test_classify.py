"""Real messages go in; what they are, whether the process may go on, and their numbers come out."""

import asyncio
import contextlib
import gc
import pkgutil
import re
import subprocess
import sys
import types
import weakref
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from torch._utils import ExceptionWrapper

from tests.oom.corpus import NCCL_NOT_MEMORY, NEGATIVES, POSITIVES, Case
from tests.oom.detectors import OTHERS
from trainer_plugins import oom
from trainer_plugins.oom import OutOfMemory, classify
from trainer_plugins.oom.rules import RULES, Source
from trainer_plugins.units import GIB, KIB, MIB

BY_WORDS = Path(__file__).with_name("detectors.txt")


def error_of(case: Case) -> BaseException | str:
    """The message as it reaches a program: raised as torch's or Python's own class, or as text."""
    if case.raised == "log":
        return case.text
    module = "" if "." in case.raised else "builtins."
    error = pkgutil.resolve_name(module + case.raised)(*([case.text] if case.text else []))
    assert isinstance(error, BaseException)
    return error


def found_in(error: BaseException | str) -> OutOfMemory:
    found = classify(error)
    assert found is not None
    return found


def reraised(error: Exception, where: str) -> BaseException:
    """An error of a worker, as torch raises it again in the process that waits for it."""
    with pytest.raises(type(error)) as raised:
        raise error
    wrapped = ExceptionWrapper((raised.type, raised.value, raised.tb), where)
    with pytest.raises(type(error)) as again:
        wrapped.reraise()
    return again.value


def a_tensor_is_pinned() -> BaseException:
    """torch pins a batch in a thread, and says that it cannot in the driver's words."""

    def pin_memory() -> None:
        raise torch.AcceleratorError(
            "CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in ..."
        )

    with pytest.raises(RuntimeError) as raised:
        pin_memory()
    wrapped = ExceptionWrapper(
        (raised.type, raised.value, raised.tb), "in pin memory thread for device 0"
    )
    with pytest.raises(RuntimeError) as again:
        wrapped.reraise()
    return again.value


def a_collective_runs_out() -> BaseException:
    """The frame of NVIDIA/nccl#1410, with the number and the name of cudaErrorMemoryAllocation."""
    return torch.distributed.DistBackendError(
        NCCL_NOT_MEMORY.text.replace("1 'invalid argument'", "2 'out of memory'")
    )


def everything_found() -> list[OutOfMemory | None]:
    return [classify(error_of(case)) for case in POSITIVES] + [
        classify(a_tensor_is_pinned()),
        classify(a_collective_runs_out()),
    ]


@pytest.mark.parametrize("case", POSITIVES, ids=lambda case: case.seen)
def test_a_real_oom_is_one(case: Case) -> None:
    error = error_of(case)
    found = found_in(error)

    assert (found.source, found.is_survivable, found.is_certain) == (
        case.source,
        case.survivable,
        case.certain,
    )
    if not isinstance(error, str):  # and in the log of that run, with what a launcher puts in front
        in_log = found_in(
            f"[rank3]:   File 'train.py', line 3, in <module>\n[rank3]: {case.raised}: {case.text}\n"
        )
        assert (in_log.source, in_log.fatal) == (found.source, found.fatal)


@pytest.mark.parametrize("case", NEGATIVES, ids=lambda case: case.seen)
def test_what_is_none_is_none(case: Case) -> None:
    assert classify(error_of(case)) is None
    assert classify(f"[rank3]: {case.raised}: {case.text}".replace("log: ", "")) is None


def test_the_corpus_is_large_and_without_repetition() -> None:
    assert len({case.text for case in POSITIVES}) == len(POSITIVES) >= 40
    assert len({case.text for case in NEGATIVES}) == len(NEGATIVES) >= 25
    assert {case.source for case in POSITIVES} == set(get_args(Source))


@pytest.mark.parametrize("number", range(len(RULES)))
def test_each_rule_is_needed(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with_it = everything_found()
    rules = oom._compile_rules()
    monkeypatch.setattr(oom, "_compile_rules", lambda: rules[:number] + rules[number + 1 :])

    assert everything_found() != with_it


def by_text(start: str) -> OutOfMemory:
    (case,) = (case for case in POSITIVES if case.text.startswith(start))
    return found_in(error_of(case))


def test_the_numbers_of_torch_today() -> None:
    found = by_text("CUDA out of memory. Tried to allocate 22.00 MiB.")

    assert found.device == 0
    assert found.requested_bytes == 22 * MIB
    assert found.total_bytes == int(23.65 * GIB)
    assert found.free_bytes == int(11.06 * MIB)
    assert found.allocated_bytes == int(22.90 * GIB)
    assert found.unused_bytes == int(194.87 * MIB)
    assert found.process_bytes == ((None, int(23.60 * GIB)),)
    assert found.limit_bytes is found.reserved_bytes is None


def test_the_neighbours_are_told_by_pid() -> None:
    found = by_text("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacty")

    assert found.total_bytes == int(21.99 * GIB)
    # 8671 holds what torch has reserved and a context: it is the process that failed.
    assert [pid for pid, _ in found.process_bytes] == [1488, 1582, 3537, None, 8829]
    assert found.process_bytes[3] == (None, int(8.90 * GIB))
    assert by_text("2024-04-29T14:55:41").process_bytes == ((1440763, 60356340 * KIB),)


def said(requested: str, total: str, free: str, more: str) -> str:
    card = f"GPU 0 has a total capacity of {total} of which {free} is free."
    return f"CUDA out of memory. Tried to allocate {requested}. {card} {more}"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        # verl-project/verl#2848
        (
            said("594.00 MiB", "184.31 GiB", "179.98 GiB", ""),
            "594.0 MiB were refused with 179.98 GiB of 184.31 GiB free",
        ),
        # microsoft/WSL#11050: what NVML says where it does not know
        (
            said(
                "20.00 MiB",
                "23.99 GiB",
                "0 bytes",
                "this process has 17179869184.00 GiB memory in use.",
            ),
            "17179869184.00 GiB of a device",
        ),
        (said("20.00 MiB", "23.99 GiB", "24.99 GiB", ""), "24.99 GiB free of 23.99 GiB"),
        (said("20.00 MiB", "23.99 GiB", "23.00 GiB", "8.00 GiB allowed;"), ""),
        (said("9.00 GiB", "23.99 GiB", "12.50 GiB", ""), ""),
        (said("1.00 GiB", "23.99 GiB", "4.00 GiB", "Process 7 has 2.00 GiB memory in use."), ""),
    ],
)
def test_numbers_that_cannot_be_true_are_not_counted_on(text: str, why: str) -> None:
    found = found_in(torch.OutOfMemoryError(text))

    assert why in found.fatal
    assert found.is_survivable is not bool(why)


def test_a_neighbour_that_holds_as_much_is_still_a_neighbour() -> None:
    reserved = "Of the allocated memory 8.00 GiB is allocated by PyTorch, and 1.00 GiB is reserved by PyTorch but unallocated."
    for others, own in (
        ("Process 1 has 8.50", [1]),
        ("Process 1 has 9.40", [None]),
        ("Process 1 has 14.00", [1]),
    ):
        found = found_in(
            said("9.00 GiB", "24.00 GiB", "1.00 GiB", f"{others} GiB memory in use. {reserved}")
        )
        assert [pid for pid, _ in found.process_bytes] == own
    twins = "Process 1 has 9.90 GiB memory in use. Process 2 has 9.40 GiB memory in use."
    assert (
        found_in(said("9.00 GiB", "24.00 GiB", "1.00 GiB", f"{twins} {reserved}")).process_bytes[0][
            0
        ]
        == 1
    )


@pytest.mark.parametrize(
    ("start", "numbers"),
    [
        (
            "CUDA out of memory. Tried to allocate 1.69 GiB (GPU 0",
            {
                "requested": 1.69 * GIB,
                "total": 14.56 * GIB,
                "free": 1.31 * GIB,
                "reserved": 1.01 * GIB,
            },
        ),
        (
            "CUDA out of memory. Tried to allocate 1024.00 MiB",
            {"requested": GIB, "unused": 607 * KIB},
        ),
        ("CUDA out of memory. Tried to allocate more than 1EB", {"requested": None, "total": None}),
        (
            "HIP out of memory. Tried to allocate 2.00 MiB",
            {"limit": 1.05 * GIB, "total": 287.98 * GIB},
        ),
        (
            "HIP out of memory. Tried to allocate 16.00 GiB",
            {"requested": 16 * GIB, "allocated": 0, "unused": 0},
        ),
        (
            "MPS backend out of memory (MPS allocated: 9.57",
            {"requested": 292.5 * MIB, "limit": 27.2 * GIB},
        ),
        (
            "MPS backend out of memory (MPS allocated: 16.00",
            {"requested": 256, "allocated": 16 * GIB},
        ),
        ("[Rank:0] FATAL ERROR", {"requested": 234881024}),
        ("FATAL ERROR :: MODULE:SYNHELPER", {"requested": 14493510400}),
        (
            "Allocation on device 0 would",
            {
                "requested": 320 * MIB,
                "total": 23.69 * GIB,
                "free": 2.94 * MIB,
                "allocated": 6.89 * GIB,
            },
        ),
        ("ng30903", {"requested": 6291456}),
        ("NCCL error in: /opt", {"requested": 1920}),
        ("[enforce fail at alloc_cpu.cpp:75]", {"requested": 132426121216}),
        ("unable to mmap 29764", {"requested": 29764}),
        ("numpy.core._exceptions.MemoryError", {"requested": 926 * GIB}),
        ("pyarrow.lib", {"requested": 2172846080}),
        ("2022-07-03", {"requested": 1073741824}),
        ("memory allocation of", {"requested": 2097152}),
    ],
)
def test_the_numbers_of_the_others(start: str, numbers: dict[str, float | None]) -> None:
    found = by_text(start)

    told = {name: getattr(found, f"{name}_bytes") for name in numbers}
    assert told == {
        name: None if number is None else int(number) for name, number in numbers.items()
    }


def test_a_training_that_does_not_fit(simgpu, make_trainer) -> None:
    simgpu.set_capacity(12 * MIB)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        make_trainer(per_device_train_batch_size=64).train()
    found = found_in(raised.value)

    assert (found.source, found.is_survivable, found.is_certain, found.device) == (
        "allocator",
        True,
        True,
        0,
    )
    assert found.total_bytes == 12 * MIB
    assert found.requested_bytes is not None
    assert found.free_bytes is not None
    assert found.requested_bytes > found.free_bytes
    ((pid, own_bytes),) = found.process_bytes
    assert pid is None
    assert 0 < own_bytes <= 12 * MIB


def test_a_failure_that_a_test_injects_reads_like_a_real_one(simgpu, make_trainer) -> None:
    simgpu.set_capacity(64 * MIB)
    trainer = make_trainer()
    simgpu.fail_at(100)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        trainer.train()

    assert (found_in(raised.value).free_bytes, found_in(raised.value).fatal) == (0, "")


def test_main_memory_that_does_not_fit() -> None:
    with pytest.raises(RuntimeError) as by_torch:
        torch.empty(1 << 50)
    with pytest.raises(MemoryError) as by_numpy:
        np.empty(1 << 55)

    assert found_in(by_torch.value).source == found_in(by_numpy.value).source == "host"
    assert found_in(by_torch.value).requested_bytes == 4 << 50
    assert found_in(by_numpy.value).requested_bytes == 8 << 55


def test_an_error_of_a_worker_is_read_through_what_wraps_it() -> None:
    full = RuntimeError(
        "unable to write to file </torch_31911_952036340_6686>: No space left on device (28)"
    )
    found = found_in(reraised(full, "in DataLoader worker process 0"))

    assert found.source == "shared"
    assert found.text.startswith("RuntimeError: unable to write")
    assert (
        classify(reraised(ValueError("CUDA out of memory."), "in DataLoader worker process 0"))
        is None
    )


def test_a_batch_that_cannot_be_pinned_is_not_the_card() -> None:
    found = found_in(a_tensor_is_pinned())

    assert found.source == "pinned"
    assert "page-locked" in found.fatal
    assert found.text.splitlines()[0].endswith("AcceleratorError: CUDA error: out of memory")


def test_page_locked_memory_is_known_by_the_line_that_asked() -> None:
    with contextlib.closing(asyncio.new_event_loop()) as loop:
        native = loop.create_future()  # its result() raises from C, as a tensor's pin_memory() does
        native.set_exception(torch.AcceleratorError("CUDA error: out of memory\n"))
        tensor = types.SimpleNamespace(pin_memory=native.result)
        with pytest.raises(RuntimeError) as raised:
            tensor.pin_memory()
    found = found_in(raised.value)

    assert (found.source, found.is_survivable) == ("pinned", False)
    assert found_in(
        torch.AcceleratorError("CUDA error: out of memory")
    ).is_survivable  # of the device, for all we know


def test_a_collective_takes_its_ranks_with_it() -> None:
    found = found_in(a_collective_runs_out())

    assert (found.source, found.text, found.is_survivable) == (
        "nccl",
        "Cuda failure 2 'out of memory'",
        False,
    )


def test_the_cause_is_read_and_so_is_the_context() -> None:
    def evaluate() -> None:  # as transformers' Trainer does, with these words
        try:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        except RuntimeError as error:
            raise RuntimeError("Evaluation hit an out-of-memory error.") from error

    def tidy_up() -> None:
        try:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB.")
        except RuntimeError:
            raise AttributeError("'NoneType' object has no attribute 'zero_grad'")  # noqa: B904

    def dealt_with() -> None:
        try:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4.00 GiB.")
        except RuntimeError:
            raise RuntimeError("a row of 4,000,000 tokens; the most is 8,192") from None

    for story, requested in ((evaluate, 2 * GIB), (tidy_up, 3 * GIB), (dealt_with, None)):
        with pytest.raises(Exception) as raised:  # noqa: PT011
            story()
        found = classify(raised.value)
        assert (found.requested_bytes if found else None) == requested


def test_who_ends_the_program_is_obeyed() -> None:
    for end in (KeyboardInterrupt, SystemExit):
        stop = end("CUDA out of memory.")
        stop.__context__ = torch.OutOfMemoryError("CUDA out of memory.")
        assert classify(stop) is None


def test_a_lost_context_is_not_survived() -> None:
    after = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
    after.__context__ = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    found = found_in(after)

    assert found.source == "allocator"
    assert not found.is_survivable
    assert found_in(after.__context__).is_survivable


def test_a_circle_of_causes_ends() -> None:
    first, second = RuntimeError("one"), RuntimeError("two")
    first.__cause__, second.__cause__ = second, first

    assert classify(first) is None
    second.__context__, second.__suppress_context__ = MemoryError(), False
    assert found_in(first).source == "host"


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no exception groups")
def test_one_of_a_group_is_enough() -> None:
    groups = vars(sys.modules["builtins"])
    several = [ValueError("2"), torch.OutOfMemoryError("CUDA out of memory.")]

    assert found_in(groups["ExceptionGroup"]("two tasks", several)).source == "allocator"
    assert classify(groups["ExceptionGroup"]("one task", several[:1])) is None
    assert (
        classify(groups["BaseExceptionGroup"]("stopped", [KeyboardInterrupt(), *several])) is None
    )


def test_a_subclass_is_what_its_base_is() -> None:
    class OurError(torch.OutOfMemoryError):
        pass

    assert found_in(OurError("step 3")).source == "allocator"


def test_of_a_whole_log_the_first_certain_one_is_told() -> None:
    doubtful = "RuntimeError: cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if ..."
    ours = "[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    others = "host:1:2 [0] enqueue.cc:1085 NCCL WARN Cuda failure 'out of memory'"

    assert found_in("\n".join([doubtful, ours, others])).text.startswith(ours)
    assert found_in("\n".join([doubtful, others, ours])).source == "nccl"
    assert not found_in(doubtful).is_certain


def test_words_are_kept_and_nothing_else() -> None:
    class WatchedError(RuntimeError):
        pass

    error = WatchedError("CUDA error: out of memory\n" + "a line\n" * 50)
    alive = weakref.ref(error)
    found = found_in(error)
    del error
    gc.collect()

    assert alive() is None
    assert len(found.text.splitlines()) == 6
    assert found == found_in(
        f"{WatchedError.__module__}.{WatchedError.__qualname__}: CUDA error: out of memory\n"
        + "a line\n" * 50
    )


def test_each_repetition_in_a_rule_has_a_bound() -> None:
    """What is tried at each place then takes a time that has a bound too, and a log one that grows with its length."""
    numbers = [one for patterns in oom._NUMBERS.values() for one in patterns]
    rules = [rule.pattern for rule in RULES]
    for pattern in (*rules, *numbers, oom._DEVICE, oom._HOLDER, oom._STICKY):
        operators = re.sub(
            r"\\.|\[[^\]]*\]", "", pattern
        )  # what is escaped or of a set repeats nothing
        assert not re.search(r"[*+]|\{\d*,\}", operators), pattern
        assert all(int(most) <= 500 for most in re.findall(r"\{\d+,(\d+)\}", operators)), pattern


HOSTILE = """
import sys
from tests.oom.corpus import NEGATIVES, POSITIVES
from trainer_plugins.oom import classify
oom = "RuntimeError: CUDA error: out of memory"
for line_end in "\\n\\r":
    found = classify("a" * 1_000_000 + line_end + oom)
    assert found is not None and found.source == "driver"
for character in "1 .:-([|'_=>/\\r\\t":
    found = classify(character * 100_000 + "\\n" + oom)
    assert found is not None and found.source == "driver", character
for case in POSITIVES + NEGATIVES:
    for end in range(8, 400, 24):
        classify("x: " + case.text[:end] * (10_000 // end))
print("done")
"""


@pytest.mark.all
@pytest.mark.slow
def test_hostile_text_is_read_in_time() -> None:
    done = subprocess.run(
        [sys.executable, "-c", HOSTILE], check=True, capture_output=True, text=True, timeout=300
    )

    assert done.stdout == "done\n"


def test_numbers_without_sense_raise_nothing() -> None:
    nines = "9" * 5000
    card = f"GPU {nines} has a total capacity of 1.2.3 GiB. Process {nines} has {nines} GiB memory in use."

    assert found_in(f"CUDA out of memory. Tried to allocate {nines} EiB. {card}").device is None


RAISED = [case for case in POSITIVES if case.raised != "log"]
RAISED_NEGATIVES = [case for case in NEGATIVES if case.raised != "log"]


def row(words: str, cases: list[Case]) -> str:
    """One row of the table: how many of these each takes for an OOM."""
    detectors: tuple[Callable[..., object], ...] = (classify, *OTHERS)
    seen_by = [sum(bool(detect(error_of(case))) for case in cases) for detect in detectors]
    return f"{words:40}" + "".join(f"{number:11}" for number in (len(cases), *seen_by))


@pytest.mark.skipif(
    version("accelerate") != "1.15.0", reason="the table is about accelerate 1.15.0"
)
def test_the_table_says_what_each_detector_sees() -> None:
    table = BY_WORDS.read_text()
    *forms, every, alarms = re.findall(r"^(\S.*?)(?: +\d+){5}$", table, re.MULTILINE)
    uncovered = [case.text for case in RAISED if not any(words in case.text for words in forms)]

    assert [case for case in uncovered if case] == []  # an empty MemoryError has no words
    for words in forms:
        assert row(words, [case for case in RAISED if words in case.text]) in table
    assert (every, alarms) == ("all that are raised", "false alarms")
    assert row(every, RAISED) in table
    assert row(alarms, RAISED_NEGATIVES) in table
