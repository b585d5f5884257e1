"""How the card ran while it was measured: clocks, power and temperature, and whether something held it back.

Asked of `nvidia-smi`, which tells a line several times a second for as long as it runs. Where it is not there, nothing is
known, and the bench goes on without.
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
_HOLDS = {
    0x04: "power limit",
    0x08: "hardware slowdown",
    0x20: "temperature",
    0x40: "temperature, by hardware",
    0x80: "power brake",
}
"""By their bits, those reasons for lower clocks that are no choice of anybody's: not idleness, not clocks that were set."""


@dataclass(frozen=True)
class Sample:
    """One line of the tool, and when it came."""

    at: float
    megahertz: float
    most_megahertz: float
    memory_megahertz: float
    watts: float
    most_watts: float
    celsius: float
    reasons: int


@dataclass(frozen=True)
class CardState:
    """Of the samples of some time."""

    samples: int
    megahertz: float
    """The median; the lowest is beside it."""
    lowest_megahertz: float
    most_megahertz: float
    memory_megahertz: float
    watts: float
    most_watts: float
    celsius: float
    """The highest."""
    capped: float
    """In which share of the samples the card was held back."""
    capped_by: tuple[str, ...]

    def __str__(self) -> str:
        held = f", {self.capped:.0%} held back by {' and '.join(self.capped_by)}" if self.capped else ""
        lowest = (
            "" if self.lowest_megahertz == self.megahertz else f" ({self.lowest_megahertz:,.0f} at least)"
        )
        return f"{self.megahertz:,.0f} MHz{lowest}, {self.watts:.0f} W, {self.celsius:.0f} °C{held}"


def state_of(samples: Sequence[Sample]) -> CardState | None:
    if not samples:
        return None
    held = [sample for sample in samples if any(sample.reasons & bit for bit in _HOLDS)]
    names = (name for bit, name in _HOLDS.items() if any(sample.reasons & bit for sample in held))
    last = samples[-1]
    return CardState(
        len(samples),
        statistics.median_low(sample.megahertz for sample in samples),
        min(sample.megahertz for sample in samples),
        last.most_megahertz,
        last.memory_megahertz,
        statistics.median_low(sample.watts for sample in samples),
        last.most_watts,
        max(sample.celsius for sample in samples),
        len(held) / len(samples),
        tuple(names),
    )


def read_sample(line: str, at: float) -> Sample | None:
    """None for a line that has no such figures: a card may not tell some of them."""
    *figures, reasons = line.split(",")
    try:
        megahertz, most_megahertz, memory, watts, most_watts, celsius = map(float, figures)
        return Sample(at, megahertz, most_megahertz, memory, watts, most_watts, celsius, int(reasons, 16))
    except ValueError:
        return None


class CardWatch:
    """Watches the first card that CUDA sees, from its making until `close`."""

    def __init__(self) -> None:
        self._samples: list[Sample] = []
        self._process: subprocess.Popen[str] | None = None
        if (tool := shutil.which("nvidia-smi")) is None:
            return
        card = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0] or "0"
        command = [tool, f"--id={card}", f"--query-gpu={','.join(_FIELDS)}", f"--loop-ms={_MILLISECONDS}"]
        try:
            self._process = subprocess.Popen(
                [*command, "--format=csv,noheader,nounits"],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
        except OSError:
            return
        threading.Thread(target=self._read, name="card-watch", daemon=True).start()

    def _read(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        for line in self._process.stdout:
            if (sample := read_sample(line, time.perf_counter())) is not None:
                self._samples.append(sample)

    def between(self, begin: float, end: float) -> CardState | None:
        """From one `time.perf_counter()` to another; None where nothing was told in that time."""
        return state_of([sample for sample in self._samples if begin <= sample.at <= end])

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
