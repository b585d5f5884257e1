"""The current speed of this machine: its memory bandwidth, and its byte products per second, on all cores together.

A byte product is one multiplication in an int8 dot product. All operands are in registers.

Other virtual machines on the same host take memory bandwidth and shared cores. Neither CPU time nor stolen time shows
this, so the remaining speed has to be measured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import numpy as np

from weft.backends.cpu.threads import thread_count

READING_SHARE = 0.6
"""A run below this fraction of the best memory bandwidth counts as disturbed. The best is rare: on an idle virtual
machine the median was 0.7 of it, and with a limit of 0.8 every run counted as disturbed."""
PRODUCTS_SHARE = 0.9
"""A run below this fraction of the best speed of byte products counts as disturbed, too. Byte products use only registers,
so the median is 0.95 of the best."""
_PROBE_BYTES = 256 << 20
_PROBE_SECONDS = 0.2
"""Time for each of the two figures."""
_CALIBRATION_COUNT = 8


@dataclass(frozen=True)
class Speed:
    reading: float
    """Bytes per second that all cores read from memory."""
    products: float | None
    """Byte products per second; None if the processor has no instructions for them."""

    def slower(self, other: Speed) -> Speed:
        """For each figure the lower of the two speeds."""
        return Speed(min(self.reading, other.reading), _of_both(min, self.products, other.products))

    def faster(self, other: Speed) -> Speed:
        """For each figure the higher of the two speeds."""
        return Speed(max(self.reading, other.reading), _of_both(max, self.products, other.products))

    def shortfalls(self, best: Speed) -> list[str]:
        """Sentences about the figures that are too far below the best; empty if none is."""
        found = []
        if self.reading < READING_SHARE * best.reading:
            found.append(f"memory bandwidth was at {self.reading / best.reading:.0%} of its best")
        if self.products and best.products and self.products < PRODUCTS_SHARE * best.products:
            found.append(f"arithmetic was at {self.products / best.products:.0%} of its best")
        return found

    def __str__(self) -> str:
        products = "" if self.products is None else f", multiplies {2 * self.products / 1e9:,.0f} GOP/s"
        return f"reads {self.reading / 1e9:.1f} GB/s{products}"


def _of_both(choose: Callable[[float, float], float], one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else choose(one, other)


class SpeedProbe:
    """Measures on its own threads, which sleep in between. Raises ImportError without the C++ kernels."""

    def __init__(self, threads: int | None = None, data_bytes: int = _PROBE_BYTES) -> None:
        from weft import _kernels

        self._kernels = _kernels
        self.pool = _kernels.Pool(thread_count(threads))
        # More bytes than the caches hold. Every page is written: unwritten pages all map to one cached page of zeros.
        # The byte is a valid code of a weight, and a small number if it is read as a scale.
        self.data = np.full(data_bytes, 0x11, np.uint8)

    def reading(self, seconds: float) -> float:
        """Bytes per second, the best of the tries within the time."""
        return self.data.size / self._kernels.measure_read(self.data, self.pool, seconds)

    def products(self, seconds: float) -> float:
        """Byte products per second, the best of the tries within the time; 0 without instructions for them."""
        return self._kernels.measure_products(self.pool, seconds)

    def measure(self) -> Speed:
        """Returns the median over the measuring time: the best would hide a disturbance that leaves short quiet
        moments."""
        return Speed(
            _median_over(_PROBE_SECONDS, self.reading), _median_over(_PROBE_SECONDS, self.products) or None
        )


def _median_over(seconds: float, measure: Callable[[float], float]) -> float:
    found, end = [measure(0.0)], perf_counter() + seconds
    while found[0] and perf_counter() < end:
        found.append(measure(0.0))
    return median(found)


class Gauge:
    """Measures the machine, and keeps the best speed so far. Disabled without a probe."""

    def __init__(self, probe: Callable[[], Speed] | None) -> None:
        self._probe = probe
        self.best: Speed | None = None

    @property
    def is_disabled(self) -> bool:
        return self._probe is None

    def measure(self) -> Speed | None:
        if self._probe is None:
            return None
        speed = self._probe()
        self.remember(speed)
        return speed

    def remember(self, speed: Speed | None) -> None:
        """Updates the best speed with `speed`, which may come from an earlier run."""
        if speed is not None:
            self.best = speed if self.best is None else self.best.faster(speed)

    def calibrate(self) -> None:
        """Measures for some seconds, so that the first run has a reference."""
        if not self.is_disabled:
            for _ in range(_CALIBRATION_COUNT):
                self.measure()


def open_gauge() -> Gauge:
    """A gauge with a probe; a disabled one if weft is installed without the C++ kernels."""
    try:
        return Gauge(SpeedProbe().measure)
    except ImportError:
        return Gauge(None)
