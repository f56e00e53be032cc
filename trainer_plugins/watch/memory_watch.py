"""MemoryWatch: watches one device with a budget and a timeline, independent of the Trainer."""

import os
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from operator import attrgetter
from time import monotonic

import psutil

from trainer_plugins.allocator.in_force import has_expandable_segments
from trainer_plugins.devices import Device, HostDevice
from trainer_plugins.finding import Finding
from trainer_plugins.reading import MemoryReading
from trainer_plugins.record.metrics import metrics_of
from trainer_plugins.record.timeline import Flush, Remark, Sample, Timeline
from trainer_plugins.watch.foreign import (
    context_allowance_bytes,
    foreign_memory,
    helpers,
    tolerance_bytes,
)
from trainer_plugins.watch.fragmentation import allocator_retries, stuck_memory
from trainer_plugins.watch.leak import (
    LOOKS_TO_NAME,
    RISES_AT_MOMENTS,
    WARM_UP_LOOKS,
    WINDOW,
    AtMoments,
    Footprint,
    Teller,
    is_leak_news,
    leak_at,
    leaks,
)
from trainer_plugins.watch.pressure import (
    Budget,
    host_pressure,
    judge_shared_memory,
    oom_kills,
    pressure,
)

HOST_EVERY_SECONDS = 5.0
PROCESSES_EVERY_SECONDS = 10.0
_WAITS = {"leak-cache": WINDOW // 4}  # looks until a leak is named: naming lengths takes longer
WORKERS_SHARE = 0.01  # largest share of time spent on reading the workers' memory


class MemoryWatch:
    """Looks at one device, remembers its readings, and reports findings that are new or worse."""

    # It owns the device's peak counter: each look reads the peak and resets it.

    def __init__(
        self,
        device: Device,
        timeline: Timeline,
        budget: Budget | None = None,
        flushes: tuple[Timeline, ...] = (),
    ) -> None:
        self.device = device
        self.timeline = timeline
        self.budget = budget or Budget()
        self.flushes = flushes
        self.teller: Teller | None = None
        self.generations = GenerationPeaks(device)
        self._is_expandable = has_expandable_segments()
        self._host = device if isinstance(device, HostDevice) else HostDevice()
        self._host_reading: MemoryReading | None = None
        self._host_facts = self._host.facts()
        self._look_at_host_at = self._ask_processes_at = self._ask_workers_at = 0.0
        self._num_train_looks = 0
        self._warm: MemoryReading | None = None
        self._last: MemoryReading | None = None
        self._num_noted = timeline.num_added
        self._non_torch_bytes: int | None = None
        self._footprints: deque[Footprint] = deque(maxlen=WINDOW)
        self._growing_at: set[str] = set()  # moments with an ongoing leak
        self._unnamed: list[Finding] = []
        self._num_waited = 0
        self._of_workers: deque[Footprint] = deque(maxlen=WINDOW)
        self._at_moments = AtMoments()
        self._num_to_name: dict[str, int] = {}  # recurrences until its leak is named
        self._judged_flush: Flush | None = None
        self._reported: dict[str, Finding] = {}
        self._charted: MemoryReading | None = None
        self._num_charted: dict[Timeline, int] = {}

    def look(self, step: int, moment: str, num_tokens_seen: int = 0) -> list[Finding]:
        """Take a reading, start a new peak, and return the new findings; takes about 50 us."""
        generated, reading = self.generations.take(step)
        if generated is not None:
            self.timeline.add(generated)
        self._excuse_survival(reading)
        self.timeline.add(
            Sample(step=step, moment=moment, reading=reading, num_tokens_seen=num_tokens_seen)
        )
        if self._charted is None:  # the first peak belongs to loading the model
            self._begin_chart(reading)
        judged = (
            pressure(generated.reading, self.budget, generated.moment) if generated else None,
            *self._judge_device(reading, moment),
            *self._judge_host(moment),
            *self._judge_growth(reading, step, moment),
            *(self._judge_workers(reading, step) if moment == "train" else ()),
        )
        news = []
        for finding in filter(None, judged):
            if self._is_news(finding):
                news.append(finding)
                self._reported[finding.code] = finding
                self.timeline.add(Remark(step=step, finding=finding))
        return news

    def _is_news(self, finding: Finding) -> bool:
        before = self._reported.get(finding.code)
        if finding.code.startswith("leak-"):
            return is_leak_news(finding, before)
        return before is None or finding.worse_than(before)

    def _excuse_survival(self, reading: MemoryReading) -> None:
        """Ignore allocator retries of an interval in which survival handled an OOM."""
        noted, self._num_noted = self.timeline.since(self._num_noted), self.timeline.num_added
        before, self._last = self._last, reading
        codes = {each.finding.code for each in noted if isinstance(each, Remark)}
        if self._warm is None or before is None or "out-of-memory-survived" not in codes:
            return
        num = self._warm.num_alloc_retries + reading.num_alloc_retries - before.num_alloc_retries
        self._warm = replace(self._warm, num_alloc_retries=num)

    def metrics(self) -> dict[str, float] | None:
        """Return the metrics since the last call, without a new reading; None without a look."""
        entries = [
            entry for timeline, num in self._num_charted.items() for entry in timeline.since(num)
        ]
        readings = [entry.reading for entry in entries if isinstance(entry, Sample)]
        if self._charted is None or not readings:
            return None
        flushes = [entry for entry in entries if isinstance(entry, Flush)]
        seen = metrics_of(self._charted, readings, flushes, self._non_torch_bytes or 0)
        self._begin_chart(readings[-1])
        return seen

    def _begin_chart(self, reading: MemoryReading) -> None:
        self._charted = reading
        self._num_charted = {each: each.num_added for each in (self.timeline, *self.flushes)}

    def _judge_device(self, reading: MemoryReading, moment: str) -> Iterator[Finding | None]:
        yield pressure(reading, self.budget, moment)
        flushes = (each.last_flush for each in self.flushes if each.last_flush is not None)
        flush = max(flushes, key=lambda each: each.time_seconds, default=None)
        if flush is not None and flush is not self._judged_flush:
            self._judged_flush = flush
            yield stuck_memory(flush, reading.total_bytes, is_expandable=self._is_expandable)
        if self._warm is not None:
            yield allocator_retries(self._warm, reading, is_expandable=self._is_expandable)
        if self.device is not self._host:
            yield self._judge_foreign(reading)

    def _judge_foreign(self, reading: MemoryReading) -> Finding | None:
        allowance_bytes = context_allowance_bytes(reading.total_bytes)
        if self._non_torch_bytes is None:
            self._non_torch_bytes = min(reading.non_torch_bytes, allowance_bytes)
        elif self._num_train_looks < WARM_UP_LOOKS and reading.non_torch_bytes <= allowance_bytes:
            # NCCL's and cuBLAS's buffers.
            self._non_torch_bytes = max(self._non_torch_bytes, reading.non_torch_bytes)
        suspicious_bytes = self._non_torch_bytes + tolerance_bytes(reading.total_bytes)
        if reading.non_torch_bytes < suspicious_bytes or monotonic() < self._ask_processes_at:
            return None
        self._ask_processes_at = monotonic() + PROCESSES_EVERY_SECONDS
        processes = self.device.processes()
        return foreign_memory(reading, self._non_torch_bytes, processes, own_pids())

    def _judge_host(self, moment: str) -> tuple[Finding | None, ...]:
        if moment == "train" and monotonic() < self._look_at_host_at:
            return ()
        self._look_at_host_at = monotonic() + HOST_EVERY_SECONDS
        facts = self._host.facts()
        self._host_reading = self._host.read()
        full = host_pressure(self._host_reading, self.budget)
        return full, oom_kills(self._host_facts, facts), judge_shared_memory(facts)

    def _judge_growth(self, reading: MemoryReading, step: int, moment: str) -> list[Finding]:
        if moment in ("save", "eval"):
            return self._judge_moment(reading, step, moment)
        if moment not in ("train", "end"):
            return []
        self._at_moments.step(reading.allocated_bytes)
        if self._unnamed and self.teller is not None:
            self.teller.look()
            self._num_waited += 1
            due = [
                each
                for each in self._unnamed
                if moment == "end" or self._num_waited >= _WAITS.get(each.code, LOOKS_TO_NAME)
            ]
            self._unnamed = [each for each in self._unnamed if each not in due]
            return self._report(due, step)
        if moment == "end" or self._unnamed:
            return []
        self._num_train_looks += 1
        if self._num_train_looks == WARM_UP_LOOKS:
            self._warm = reading
        if self._num_train_looks <= WARM_UP_LOOKS or self._host_reading is None:
            return []
        self._footprints.append(Footprint.take(step, reading, self._host.resident_bytes()))
        # Judge each time a quarter of the window is new: it costs 0.2 ms, and leaks are slow.
        if self._num_train_looks % (WINDOW // 4):
            return []
        host = self._host_reading
        found = leaks(self._footprints, reading, host, is_expandable=self._is_expandable)
        news = [each for each in found if self._is_news(each)]
        if self._growing_at:  # often enough to look like steps
            news = [each for each in news if each.code != "leak-tensors"]
        if self.teller is None or not news:
            return self._report(news, step)
        self.teller.begin()
        self._unnamed, self._num_waited = news, 0
        return []

    def _judge_workers(self, reading: MemoryReading, step: int) -> list[Finding]:
        began = monotonic()
        if self._host_reading is None or began < self._ask_workers_at:
            return []
        num_bytes = sum(self._host.worker_bytes())
        self._of_workers.append(Footprint(step, 0, 0, 0, 0, num_bytes))
        took = monotonic() - began  # the kernel walks every worker's page table
        self._ask_workers_at = began + max(HOST_EVERY_SECONDS, took / WORKERS_SHARE)
        found = leaks(self._of_workers, reading, self._host_reading)
        return self._report([each for each in found if self._is_news(each)], step)

    def _judge_moment(self, reading: MemoryReading, step: int, moment: str) -> list[Finding]:
        rises = self._at_moments.rises(moment, reading.total_bytes)
        if len(rises) < RISES_AT_MOMENTS - LOOKS_TO_NAME:
            self._growing_at.discard(moment)
            self._num_to_name.pop(moment, None)
            return []
        if self._unnamed or self.device is self._host:
            return []
        found = leak_at(moment, rises, reading, step)
        if moment not in self._num_to_name:
            if self._is_news(found):
                self._num_to_name[moment] = LOOKS_TO_NAME
                if self.teller is not None:
                    self.teller.begin()
            return []
        self._num_to_name[moment] -= 1
        if self._num_to_name[moment]:
            return []
        del self._num_to_name[moment]
        self._growing_at.add(moment)
        return [self.teller.tell(found, step, moment) if self.teller else found]

    def _report(self, found: list[Finding], step: int) -> list[Finding]:
        told = [self.teller.tell(each, step) if self.teller else each for each in found]
        for place, leak in enumerate(told):
            is_outside = leak.code == "leak-non-torch"
            if is_outside and (named := helpers(self.device.processes(), own_pids())):
                also = f"{leak.evidence}; also of this run, on this card: {named}"
                told[place] = replace(leak, evidence=also)
        return told


class GenerationPeaks:
    """Reads the device around each generation between two looks, and keeps the fullest reading."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._depth = 0
        self._around_bytes = 0  # highest peak before a generation, since the last look
        self._fullest: Sample | None = None

    def begin(self) -> None:
        """Begin a generation. A nested one belongs to the outer one."""
        self._depth += 1
        if self._depth == 1:
            self._around_bytes = max(self._around_bytes, self._read().peak_allocated_bytes)

    def end(self) -> None:
        """End a generation. Call it once per `begin`, even if the generation or `begin` raised."""
        self._depth -= 1
        if self._depth:
            return
        reading, num = self._read(), 1
        if self._fullest is not None:
            reading = max(reading, self._fullest.reading, key=attrgetter("pressure"))
            num += self._fullest.num_readings
        self._fullest = Sample(step=0, moment="generate", reading=reading, num_readings=num)

    def take(self, step: int) -> tuple[Sample | None, MemoryReading]:
        """Return the fullest generation, and a reading with the peaks since the last look."""
        generated = None if self._fullest is None else replace(self._fullest, step=step)
        reading = self._read()
        peak_bytes = max(self._around_bytes, reading.peak_allocated_bytes)
        self._fullest, self._around_bytes = None, 0
        return generated, replace(reading, peak_allocated_bytes=peak_bytes)

    def _read(self) -> MemoryReading:
        reading = self._device.read()
        self._device.reset_peak()
        return reading


def own_pids() -> set[int]:
    """Return the pids of this run on this machine: ours, our children, our launcher's ranks."""
    me = psutil.Process()
    family = [me, *me.children(recursive=True)]
    if "LOCAL_RANK" in os.environ and (launcher := me.parent()) is not None:
        family += launcher.children(recursive=True)
    return {process.pid for process in family}
