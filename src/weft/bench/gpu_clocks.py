"""State of the GPU during a measurement: clocks, power, temperature, and whether it was throttled.

`nvidia-smi` prints a sample several times per second. Without it, the benchmark runs without these figures.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

_MILLISECONDS = 100
_FIELDS = (
    "clocks.sm",
    "clocks.max.sm",
    "clocks.mem",
    "power.draw",
    "power.limit",
    "temperature.gpu",
    "clocks_throttle_reasons.active",
)
_THROTTLE_REASONS = {
    0x04: "power limit",
    0x08: "hardware slowdown",
    0x20: "temperature",
    0x40: "temperature, by hardware",
    0x80: "power brake",
}
"""Throttle reasons by bit. Idleness and clocks that the operator has set are not listed: they are not throttling."""


@dataclass(frozen=True)
class Sample:
    """One line of nvidia-smi, and its arrival time."""

    at: float
    megahertz: float
    most_megahertz: float
    memory_megahertz: float
    watts: float
    most_watts: float
    celsius: float
    reasons: int


@dataclass(frozen=True)
class GpuState:
    """Summary of the samples of an interval."""

    samples: int
    megahertz: float
    """The median clock of the samples."""
    lowest_megahertz: float
    most_megahertz: float
    memory_megahertz: float
    watts: float
    most_watts: float
    celsius: float
    """Highest temperature of the samples."""
    capped: float
    """Fraction of the samples in which the GPU was throttled."""
    capped_by: tuple[str, ...]

    def __str__(self) -> str:
        throttled = f", {self.capped:.0%} throttled by {' and '.join(self.capped_by)}" if self.capped else ""
        lowest = (
            "" if self.lowest_megahertz == self.megahertz else f" ({self.lowest_megahertz:,.0f} at least)"
        )
        return f"{self.megahertz:,.0f} MHz{lowest}, {self.watts:.0f} W, {self.celsius:.0f} °C{throttled}"


def state_of(samples: Sequence[Sample]) -> GpuState | None:
    if not samples:
        return None
    throttled = [sample for sample in samples if any(sample.reasons & bit for bit in _THROTTLE_REASONS)]
    names = (
        name for bit, name in _THROTTLE_REASONS.items() if any(sample.reasons & bit for sample in throttled)
    )
    last = samples[-1]
    return GpuState(
        len(samples),
        statistics.median_low(sample.megahertz for sample in samples),
        min(sample.megahertz for sample in samples),
        last.most_megahertz,
        last.memory_megahertz,
        statistics.median_low(sample.watts for sample in samples),
        last.most_watts,
        max(sample.celsius for sample in samples),
        len(throttled) / len(samples),
        tuple(names),
    )


def read_sample(line: str, at: float) -> Sample | None:
    """Parses a line of nvidia-smi. None if a figure is missing: some GPUs do not report all."""
    *figures, reasons = line.split(",")
    try:
        megahertz, most_megahertz, memory, watts, most_watts, celsius = map(float, figures)
        return Sample(at, megahertz, most_megahertz, memory, watts, most_watts, celsius, int(reasons, 16))
    except ValueError:
        return None


class GpuWatch:
    """Samples the first visible GPU from construction until `close`."""

    def __init__(self) -> None:
        self._samples: list[Sample] = []
        self._process: subprocess.Popen[str] | None = None
        if (tool := shutil.which("nvidia-smi")) is None:
            return
        gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0] or "0"
        command = [tool, f"--id={gpu}", f"--query-gpu={','.join(_FIELDS)}", f"--loop-ms={_MILLISECONDS}"]
        try:
            self._process = subprocess.Popen(
                [*command, "--format=csv,noheader,nounits"],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
        except OSError:
            return
        threading.Thread(target=self._read, name="gpu-watch", daemon=True).start()

    def _read(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        for line in self._process.stdout:
            if (sample := read_sample(line, time.perf_counter())) is not None:
                self._samples.append(sample)

    def between(self, begin: float, end: float) -> GpuState | None:
        """Summary between two values of `time.perf_counter()`; None if there are no samples."""
        return state_of([sample for sample in self._samples if begin <= sample.at <= end])

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
