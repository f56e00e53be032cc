"""MemoryWatch: watches one device with a budget and a timeline; it does not know the Trainer."""

import os
from collections import deque
from collections.abc import Iterable
from time import monotonic

import psutil

from trainer_plugins.allocator.in_force import has_expandable_segments
from trainer_plugins.devices import Device, HostDevice
from trainer_plugins.finding import Finding
from trainer_plugins.reading import MemoryReading
from trainer_plugins.record.metrics import MemoryMetrics, metrics_of
from trainer_plugins.record.timeline import Flush, Remark, Sample, Timeline
from trainer_plugins.watch.foreign import context_allowance_bytes, foreign_memory, tolerance_bytes
from trainer_plugins.watch.fragmentation import allocator_retries, stuck_memory
from trainer_plugins.watch.generation import GenerationPeaks
from trainer_plugins.watch.host import host_pressure, oom_kills, shared_memory
from trainer_plugins.watch.leak import WARM_UP_LOOKS, WINDOW, Footprint, leaks
from trainer_plugins.watch.pressure import Budget, pressure

HOST_EVERY_SECONDS = 5.0
PROCESSES_EVERY_SECONDS = 10.0


class MemoryWatch:
    """Looks at one device, remembers what it saw, and reports what is new or has become worse.

    It owns the device's peak counter: each look reads it and starts a new interval.
    """

    def __init__(
        self,
        device: Device,
        timeline: Timeline,
        budget: Budget | None = None,
        flushes: tuple[Timeline, ...] = (),
    ) -> None:
        """Set what is watched.

        Args:
            device: the device to watch.
            timeline: where readings and findings go.
            budget: how full the device may become.
            flushes: the timelines in which releases of its cache may be recorded.
        """
        self.device = device
        self.timeline = timeline
        self.budget = budget or Budget()
        self.flushes = flushes
        self.generations = GenerationPeaks(device)
        self._is_expandable = has_expandable_segments()
        self._host = device if isinstance(device, HostDevice) else HostDevice()
        self._host_reading: MemoryReading | None = None
        self._host_facts = self._host.facts()
        self._look_at_host_at = self._ask_processes_at = 0.0
        self._num_train_looks = 0
        self._warm: MemoryReading | None = None
        self._non_torch_bytes: int | None = None
        self._footprints: deque[Footprint] = deque(maxlen=WINDOW)
        self._judged_flush: Flush | None = None
        self._said: dict[str, Finding] = {}
        self._charted: MemoryReading | None = None
        self._num_charted: dict[Timeline, int] = {}

    def look(self, step: int, moment: str, num_tokens_seen: int = 0) -> list[Finding]:
        """Take one reading, start a new peak, and return the news. Takes about 50 microseconds.

        Args:
            step: optimizer steps completed.
            moment: what the run was doing since the last look: `train`, `eval`, `predict`, `save`,
                `begin`, `end`. What it generated meanwhile is a moment of its own, `generate`.
            num_tokens_seen: tokens of training so far, on all ranks; 0 if nobody counts them.
        """
        generated = self.generations.sample(step)
        if generated is not None:
            self.timeline.add(generated)
        reading = self.generations.with_what_was_around(self.device.read())
        self.device.reset_peak()
        self.timeline.add(
            Sample(step=step, moment=moment, reading=reading, num_tokens_seen=num_tokens_seen)
        )
        if self._charted is None:  # the first peak belongs to what came before, loading the model
            self._begin_chart(reading)
        findings = [
            *self._judge_generation(generated),
            *self._judge_card(reading, moment),
            *self._judge_host(moment),
            *self._judge_growth(reading, step, moment),
        ]
        news = [finding for finding in findings if self._is_news(finding)]
        for finding in news:
            self._said[finding.code] = finding
            self.timeline.add(Remark(step=step, finding=finding))
        return news

    def metrics(self) -> MemoryMetrics | None:
        """Return what was seen since the last call; None if there was no look since then.

        It takes no reading.
        """
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
        self._num_charted = {
            timeline: timeline.num_added for timeline in (self.timeline, *self.flushes)
        }

    def _is_news(self, finding: Finding) -> bool:
        before = self._said.get(finding.code)
        return before is None or finding.worse_than(before)

    def _judge_generation(self, generated: Sample | None) -> Iterable[Finding]:
        if generated is not None and (
            found := pressure(generated.reading, self.budget, generated.moment)
        ):
            yield found

    def _judge_card(self, reading: MemoryReading, moment: str) -> Iterable[Finding]:
        if found := pressure(reading, self.budget, moment):
            yield found
        flush = next(
            (timeline.last_flush for timeline in self.flushes if timeline.last_flush), None
        )
        if flush is not None and flush is not self._judged_flush:
            self._judged_flush = flush
            if found := stuck_memory(flush, reading.total_bytes, is_expandable=self._is_expandable):
                yield found
        if self._warm is not None and (
            found := allocator_retries(self._warm, reading, is_expandable=self._is_expandable)
        ):
            yield found
        if self.device is not self._host:
            yield from self._judge_foreign(reading)

    def _judge_foreign(self, reading: MemoryReading) -> Iterable[Finding]:
        allowance = context_allowance_bytes(reading.total_bytes)
        if self._non_torch_bytes is None:
            self._non_torch_bytes = min(reading.non_torch_bytes, allowance)
        elif self._num_train_looks < WARM_UP_LOOKS and reading.non_torch_bytes <= allowance:
            # NCCL's and cuBLAS's buffers.
            self._non_torch_bytes = max(self._non_torch_bytes, reading.non_torch_bytes)
        suspicious = reading.non_torch_bytes >= self._non_torch_bytes + tolerance_bytes(
            reading.total_bytes
        )
        if not suspicious or monotonic() < self._ask_processes_at:
            return
        self._ask_processes_at = monotonic() + PROCESSES_EVERY_SECONDS
        if found := foreign_memory(
            reading, self._non_torch_bytes, self.device.processes(), own_pids()
        ):
            yield found

    def _judge_host(self, moment: str) -> Iterable[Finding]:
        if (
            moment == "train"
            and self._host_reading is not None
            and monotonic() < self._look_at_host_at
        ):
            return
        self._look_at_host_at = monotonic() + HOST_EVERY_SECONDS
        facts = self._host.facts()
        self._host_reading = self._host.read()
        for found in (
            host_pressure(self._host_reading, self.budget),
            oom_kills(self._host_facts, facts),
            shared_memory(facts),
        ):
            if found:
                yield found

    def _judge_growth(self, reading: MemoryReading, step: int, moment: str) -> Iterable[Finding]:
        if moment != "train":
            return
        self._num_train_looks += 1
        if self._num_train_looks == WARM_UP_LOOKS:
            self._warm = reading
        if self._num_train_looks <= WARM_UP_LOOKS or self._host_reading is None:
            return
        self._footprints.append(
            Footprint(
                step=step,
                tensors=reading.allocated_bytes if self.device is not self._host else 0,
                cache=reading.cached_bytes,
                non_torch=reading.non_torch_bytes if self.device is not self._host else 0,
                host=self._host.resident_bytes(),
            )
        )
        # Judge once a quarter of the window is new: it costs 0.2 ms, and leaks are slow.
        if self._num_train_looks % (WINDOW // 4) == 0:
            yield from leaks(
                self._footprints, reading, self._host_reading, is_expandable=self._is_expandable
            )


def own_pids() -> set[int]:
    """Return this run's processes on this machine: ours, our children, our launcher's ranks."""
    me = psutil.Process()
    family = [me, *me.children(recursive=True)]
    if "LOCAL_RANK" in os.environ and (launcher := me.parent()) is not None:
        family += launcher.children(recursive=True)
    return {process.pid for process in family}
