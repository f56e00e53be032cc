"""GenerationPeaks: separates the peak of `generate` from that of the step around it."""

from dataclasses import replace
from time import time

from trainer_plugins.devices import Device
from trainer_plugins.reading import MemoryReading
from trainer_plugins.record.timeline import Sample


class GenerationPeaks:
    """Reads the device before and after each generation, between two looks of a `MemoryWatch`.

    All generations in between, such as those of an evaluation or of a rollout, become one reading:
    the fullest. It costs two readings a generation, and nothing in a run that does not generate.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._depth = 0
        self._around_bytes = 0  # the highest peak before a generation since the last look
        self._fullest: MemoryReading | None = None
        self._num = 0
        self._ended_seconds = 0.0

    def begin(self) -> None:
        """Begin a generation; one inside another belongs to the outer one."""
        self._depth += 1
        if self._depth == 1:
            self._around_bytes = max(self._around_bytes, self._read().peak_allocated_bytes)

    def end(self) -> None:
        """End it; call it once for each `begin`, even if the generation or `begin` has raised."""
        self._depth -= 1
        if self._depth:
            return
        reading = self._read()
        if self._fullest is None or reading.pressure >= self._fullest.pressure:
            self._fullest = reading
        self._num += 1
        self._ended_seconds = time()

    def sample(self, step: int) -> Sample | None:
        """Return the reading of the generations since the last call; None if there were none."""
        reading, num = self._fullest, self._num
        self._fullest, self._num = None, 0
        if reading is None:
            return None
        return Sample(
            step=step,
            moment="generate",
            reading=reading,
            time_seconds=self._ended_seconds,
            num_readings=num,
        )

    def with_earlier_peak(self, reading: MemoryReading) -> MemoryReading:
        """Return a reading whose peak includes the time before the last generation."""
        peak_bytes = max(self._around_bytes, reading.peak_allocated_bytes)
        self._around_bytes = 0
        return replace(reading, peak_allocated_bytes=peak_bytes)

    def _read(self) -> MemoryReading:
        reading = self._device.read()
        self._device.reset_peak()
        return reading
