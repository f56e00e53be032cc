"""Judgement is pure: from numbers to findings, so each rule can be shown by numbers."""

import os
import subprocess
import sys

import pytest
import torch

from tests.said_device import SaidDevice
from trainer_plugins import advice
from trainer_plugins.advice import Door
from trainer_plugins.allocator.in_force import has_expandable_segments
from trainer_plugins.devices import GpuProcess, HostFacts
from trainer_plugins.finding import Finding, Severity
from trainer_plugins.reading import MemoryReading
from trainer_plugins.record.timeline import Flush, Timeline
from trainer_plugins.units import GIB, MIB
from trainer_plugins.watch.foreign import foreign_memory, tolerance_bytes
from trainer_plugins.watch.fragmentation import allocator_retries, stuck_memory
from trainer_plugins.watch.leak import WINDOW, Footprint, leaks
from trainer_plugins.watch.memory_watch import MemoryWatch
from trainer_plugins.watch.pressure import (
    Budget,
    host_pressure,
    judge_shared_memory,
    oom_kills,
    pressure,
)


def reading(
    peak=10.0, non_torch=1.0, allocated=5.0, reserved=20.0, total=80.0, retries=0
) -> MemoryReading:
    """Sizes in GiB."""
    return MemoryReading(
        device="cuda:0",
        total_bytes=int(total * GIB),
        free_bytes=int((total - reserved - non_torch) * GIB),
        reserved_bytes=int(reserved * GIB),
        allocated_bytes=int(allocated * GIB),
        peak_allocated_bytes=int(peak * GIB),
        num_alloc_retries=retries,
    )


@pytest.mark.parametrize(
    ("peak", "severity"),
    [(0, None), (70, None), (71, Severity.WARNING), (76, Severity.WARNING), (77, Severity.ERROR)],
)
def test_pressure_by_the_marks(peak: float, severity: Severity | None) -> None:
    finding = pressure(reading(peak=peak, reserved=79), Budget(0.90, 0.97), "train")

    assert (finding.severity if finding else None) is severity


def test_pressure_says_what_it_saw_and_what_to_do() -> None:
    assert str(pressure(reading(peak=78, reserved=79), Budget(), "train")) == (
        "[memory-pressure] cuda:0 was 99% full at its peak in train (peak allocated 78.00 GiB, "
        "non-torch 1.00 GiB, total 80.00 GiB). To lower this peak, halve per_device_train_batch_size and double "
        "gradient_accumulation_steps (the effective batch stays the same, the gradient too unless "
        f"`gradient-summed` is about your loss), or set {advice.CHECKPOINTING.flag(Door.ARGUMENTS)}."
    )
    in_evaluation = pressure(reading(peak=78), Budget(), "eval")
    assert in_evaluation is not None
    assert "eval_accumulation_steps" in in_evaluation.remedy


def test_a_finding_is_said_again_only_when_it_is_worse() -> None:
    def finding(severity: Severity, amount: float) -> Finding:
        return Finding(
            code="x", severity=severity, summary="", evidence="", remedy="", amount=amount
        )

    first = finding(Severity.WARNING, 100)
    assert not first.worse_than(first)
    assert not finding(Severity.WARNING, 109).worse_than(first)
    assert finding(Severity.WARNING, 111).worse_than(first)
    assert finding(Severity.ERROR, 100).worse_than(first)
    assert not finding(Severity.INFO, 0).worse_than(first)


def flush(stuck_gib: float) -> Flush:
    return Flush(
        step=10,
        reason="interval",
        released_bytes=GIB,
        stuck_bytes=int(stuck_gib * GIB),
        seconds=0.1,
    )


def test_what_a_release_cannot_give_back_is_fragmentation() -> None:
    assert stuck_memory(flush(7), 80 * GIB) is None
    finding = stuck_memory(flush(12), 80 * GIB)
    assert finding is not None
    assert finding.code == "memory-fragmentation"
    assert "expandable_segments:True, alone" in finding.remedy


def test_retries_count_from_warm_up() -> None:
    assert allocator_retries(reading(retries=3), reading(retries=3)) is None
    finding = allocator_retries(reading(retries=3), reading(retries=5))
    assert finding is not None
    assert finding.evidence.startswith("2 retries")


def listed(*processes: tuple[int, float | None]) -> tuple[GpuProcess, ...]:
    return tuple(
        GpuProcess(pid, None if gib is None else int(gib * GIB), "python infer.py")
        for pid, gib in processes
    )


ME = {100, 101}
BYTES_ALONE = "judged by bytes alone"


@pytest.mark.parametrize(
    ("non_torch", "processes", "foreign_gib", "names"),
    [
        (1, None, None, ""),
        pytest.param(10, None, 9, BYTES_ALONE, id="nothing listed"),
        pytest.param(10, listed((7, 20.0), (8, 9.0)), 9, BYTES_ALONE, id="host pids, not ours"),
        (10, listed((100, 21.0), (8, 9.0)), 9, "pid 8 (python infer.py): 9.00 GiB"),
        (10, listed((100, 30.0)), None, ""),  # all ours: NCCL, graphs
        (10, listed((100, 15.0), (101, 15.0)), None, ""),  # two of our ranks on one card
        (10, listed((100, 21.0)), 9, "a process that the driver does not list"),
        pytest.param(10, listed((100, None), (8, 9.0)), 9, BYTES_ALONE, id="no sizes: MIG, WSL"),
        (10, listed((100, 21.0), (8, None)), 9, "size unknown"),
    ],
)
def test_foreign_memory(non_torch, processes, foreign_gib, names) -> None:
    finding = foreign_memory(reading(non_torch=non_torch), 1 * GIB, processes, ME)

    assert (finding.amount / GIB if finding else None) == foreign_gib
    assert finding is None or names in finding.evidence


def test_the_tolerance_grows_with_the_card_up_to_half_a_gib() -> None:
    assert tolerance_bytes(200 * MIB) == 10 * MIB
    assert tolerance_bytes(80 * GIB) == 512 * MIB


def footprints(num=WINDOW, **bytes_at) -> list[Footprint]:
    kinds = {"tensors": 5 * GIB, "cache": GIB, "non_torch": GIB, "host": GIB}
    return [
        Footprint(
            step=step,
            **{k: int(bytes_at[k](step)) if k in bytes_at else v for k, v in kinds.items()},
        )
        for step in range(num)
    ]


def judged(window: list[Footprint], peak: float = 40) -> dict[str, Finding]:
    host = reading(allocated=1, reserved=1, non_torch=1, total=64)
    return {finding.code: finding for finding in leaks(window, reading(peak=peak), host)}


@pytest.mark.parametrize("kind", ["tensors", "cache", "non_torch", "host"])
def test_each_kind_of_leak_has_its_name(kind: str) -> None:
    found = judged(footprints(**{kind: lambda step: GIB + step * 10 * MIB}))

    (finding,) = found.values()
    assert finding.code == f"leak-{kind.replace('_', '-')}"
    assert finding.evidence.startswith("10.0 MiB per step")
    left = (62 if kind == "host" else 80 - 40 - 1) * 1024 // 10
    assert f"about {left} steps" in finding.summary


def test_a_leak_that_ends_the_run_soon_is_an_error() -> None:
    assert (
        judged(footprints(tensors=lambda s: s * GIB // 8), 76)["leak-tensors"].severity
        is Severity.ERROR
    )
    assert (
        judged(footprints(tensors=lambda s: s * GIB // 8), 20)["leak-tensors"].severity
        is Severity.WARNING
    )


@pytest.mark.parametrize(
    "curve",
    [
        lambda step: GIB,
        lambda step: GIB + (step % 7) * 100 * MIB,  # batches of changing length
        lambda step: GIB + (step > 16) * GIB,  # one step up, as an evaluation makes
        lambda step: GIB - step * MIB,
        lambda step: GIB + step * 64,  # bytes of Python
    ],
)
def test_what_is_no_leak(curve) -> None:
    assert judged(footprints(tensors=curve, cache=curve, non_torch=curve, host=curve)) == {}


@pytest.mark.parametrize(("still", "is_leak"), [((), True), ((3,), True), ((3, 5), False)])
def test_a_leak_rises_in_every_block_but_one(still: tuple[int, ...], is_leak: bool) -> None:
    def curve(step: int) -> int:
        return GIB + 100 * MIB * sum(block not in still for block in range(1, step // 4 + 1))

    assert ("leak-tensors" in judged(footprints(tensors=curve))) is is_leak


def test_a_short_window_says_nothing() -> None:
    assert judged(footprints(WINDOW - 1, tensors=lambda step: step * GIB)) == {}


def test_the_host_before_the_kernel_acts() -> None:
    assert host_pressure(reading(total=64, reserved=20, non_torch=20), Budget()) is None
    finding = host_pressure(reading(total=64, reserved=20, non_torch=43), Budget())
    assert finding is not None
    assert finding.severity is Severity.ERROR
    assert oom_kills(HostFacts(1, 0, 0), HostFacts(1, 0, 0)) is None
    killed = oom_kills(HostFacts(1, 0, 0), HostFacts(2, 0, 0))
    assert killed is not None
    assert "killed 1 process" in killed.summary
    assert judge_shared_memory(HostFacts(0, 64 * MIB, 60 * MIB)) is None
    assert judge_shared_memory(HostFacts(0, 100 * MIB, 10 * MIB)) is None  # a tenth
    assert judge_shared_memory(HostFacts(0, 100 * MIB, 10 * MIB - 1)) is not None
    assert judge_shared_memory(HostFacts(0, 0, 0)) is None
    assert judge_shared_memory(HostFacts(0, 64 * MIB, 2 * MIB)) is not None


def looks(device: SaidDevice, *non_torch_bytes: int) -> list[str]:
    """The findings of a watch whose device shows these, one look each."""
    watch, codes = MemoryWatch(device, Timeline()), []
    for step, num_bytes in enumerate(non_torch_bytes):
        device.non_torch_bytes = num_bytes
        codes += [finding.code for finding in watch.look(step, "train")]
    return codes


@pytest.mark.parametrize(("total", "allowed"), [(80 * GIB, 3 * GIB // 2), (10 * GIB, GIB)])
def test_a_process_may_hold_a_context_outside_torch_from_the_start(
    total: int, allowed: int
) -> None:
    """A gibibyte and a half, and no more than a tenth of a small card; beside that what may move: half a gibibyte."""
    seen_at_once = allowed + 512 * MIB

    assert looks(SaidDevice(total_bytes=total), seen_at_once - 1) == []
    assert looks(SaidDevice(total_bytes=total), seen_at_once) == ["foreign-memory"]


def test_what_libraries_take_while_the_run_warms_up_is_ours() -> None:
    context, with_nccl = 300 * MIB, 1300 * MIB

    assert looks(SaidDevice(), context, *[with_nccl] * 20) == []
    assert looks(SaidDevice(), *[context] * 20, with_nccl) == ["foreign-memory"]


def test_helpers_of_this_run_that_take_the_card_are_named() -> None:
    """DCP starts some to save; pytorch#151030 saw them grow to 2 GB each."""

    class WithHelpers(SaidDevice):
        def processes(self) -> tuple[GpuProcess, ...]:  # type: ignore[override]
            held = (os.getpid(), os.getppid(), helper.pid)
            return tuple(GpuProcess(pid, self.non_torch_bytes // 3, "python") for pid in held)

    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as helper:
        device = WithHelpers()
        watch, found = MemoryWatch(device, Timeline()), []
        for step in range(48):
            device.non_torch_bytes = step * GIB // 4
            found += watch.look(step, "train")
        helper.communicate(b"\n")

    (leak,) = [each for each in found if each.code == "leak-non-torch"][:1]
    assert f"also of this run, on this card: pid {helper.pid} (python): " in leak.evidence
    assert f"pid {os.getpid()} " not in leak.evidence
    assert f"pid {os.getppid()} " not in leak.evidence


OLD, UNIFIED, HIP = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"


@pytest.mark.parametrize(
    ("variables", "is_set"),
    [
        ({}, False),
        ({OLD: "expandable_segments:True"}, True),
        ({OLD: "garbage_collection_threshold:0.8,expandable_segments:True"}, True),
        ({OLD: "expandable_segments:False"}, False),
        (
            {OLD: "max_split_size_mb:128", UNIFIED: "expandable_segments:True"},
            False,
        ),  # the old name wins
        ({HIP: "expandable_segments:True"}, bool(torch.version.hip)),
    ],
)
def test_nobody_is_told_to_set_what_is_set(
    variables: dict[str, str], is_set: bool, monkeypatch
) -> None:
    for name in (OLD, UNIFIED, HIP):
        monkeypatch.delenv(name, raising=False)
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    timeline, device = Timeline(), SaidDevice()
    watch = MemoryWatch(device, timeline, flushes=(timeline,))
    timeline.add(flush(12))
    findings = watch.look(10, "train")
    findings += leaks(footprints(cache=lambda step: GIB + step * 10 * MIB), device.read(), device.read(),
                      is_expandable=has_expandable_segments())  # fmt: skip
    retried = allocator_retries(
        reading(retries=3), reading(retries=5), is_expandable=has_expandable_segments()
    )
    findings += [retried] if retried else []

    assert [finding.code for finding in findings] == [
        "memory-fragmentation",
        "leak-cache",
        "allocator-retries",
    ]
    for finding in findings:
        assert ("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in finding.remedy) is not is_set
        assert ("segments are already expandable" in finding.remedy) is is_set


def test_a_newer_release_in_another_timeline_is_judged_too() -> None:
    own, of_run = Timeline(), Timeline()
    watch = MemoryWatch(SaidDevice(), own, flushes=(own, of_run))
    own.add(flush(0))
    assert watch.look(10, "train") == []
    of_run.add(flush(12))
    assert [each.code for each in watch.look(11, "train")] == ["memory-fragmentation"]
