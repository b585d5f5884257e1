"""What this machine gives right now: bytes read from memory and products made from registers, by all cores together.

The neighbours of a virtual machine take memory bandwidth and shared cores, and neither CPU time nor stolen time shows
it: what is left for us can only be tried.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import numpy as np

from weft.backends.cpu.threads import thread_count

READING_SHARE = 0.6
"""Of the best reading that was seen; with less, a run counts as disturbed. Not more, because the best is that of rare
moments: on an idle virtual machine half of the looks gave 0.7 of it, and with 0.8 no run was quiet."""
PRODUCTS_SHARE = 0.9
"""The same of products. They come from registers, and half of the looks give 0.95 of the best and more."""
_LOOK_BYTES = 256 << 20
_LOOK_SECONDS = 0.2
"""For each of the two figures."""
_CALIBRATION_LOOKS = 8


@dataclass(frozen=True)
class Speed:
    reading: float
    """Bytes a second from memory."""
    products: float | None
    """Products of bytes a second; None where the processor has no instructions for them."""

    def slower(self, other: Speed) -> Speed:
        """The lower of each figure."""
        return Speed(min(self.reading, other.reading), _of_both(min, self.products, other.products))

    def faster(self, other: Speed) -> Speed:
        """The higher of each figure."""
        return Speed(max(self.reading, other.reading), _of_both(max, self.products, other.products))

    def shortfalls(self, best: Speed) -> list[str]:
        """What is too far below the best, in words; nothing where the machine gave what it can."""
        found = []
        if self.reading < READING_SHARE * best.reading:
            found.append(f"the machine read at {self.reading / best.reading:.0%} of its best")
        if self.products and best.products and self.products < PRODUCTS_SHARE * best.products:
            found.append(f"the machine multiplied at {self.products / best.products:.0%} of its best")
        return found

    def __str__(self) -> str:
        products = "" if self.products is None else f", multiplies {2 * self.products / 1e9:,.0f} GOP/s"
        return f"reads {self.reading / 1e9:.1f} GB/s{products}"


def _of_both(choose: Callable[[float, float], float], one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else choose(one, other)


class SpeedProbe:
    """Reads and multiplies on threads of its own, which sleep in between. Needs the C++ kernels: ImportError without."""

    def __init__(self, threads: int | None = None, data_bytes: int = _LOOK_BYTES) -> None:
        from weft import _kernels

        self._kernels = _kernels
        self.pool = _kernels.Pool(thread_count(threads))
        # More than the caches hold, and every page written once: one that never was is a page of zeros in a cache.
        # The byte is a code like any other, and a small number where it is read as a scale.
        self.data = np.full(data_bytes, 0x11, np.uint8)

    def reading(self, seconds: float) -> float:
        """Bytes a second, the best of the tries that fit into the time."""
        return self.data.size / self._kernels.measure_read(self.data, self.pool, seconds)

    def products(self, seconds: float) -> float:
        """Products of bytes a second, the best of the tries that fit; 0 without instructions for them."""
        return self._kernels.measure_products(self.pool, seconds)

    def look(self) -> Speed:
        """The median over the time of a look: the best would be that of a quiet moment between two disturbed ones."""
        return Speed(
            _median_over(_LOOK_SECONDS, self.reading), _median_over(_LOOK_SECONDS, self.products) or None
        )


def _median_over(seconds: float, measure: Callable[[float], float]) -> float:
    found, end = [measure(0.0)], perf_counter() + seconds
    while found[0] and perf_counter() < end:
        found.append(measure(0.0))
    return median(found)


class Gauge:
    """Looks at the machine, and remembers the best it has seen. Without a probe it sees nothing."""

    def __init__(self, probe: Callable[[], Speed] | None) -> None:
        self._probe = probe
        self.best: Speed | None = None

    @property
    def is_blind(self) -> bool:
        return self._probe is None

    def look(self) -> Speed | None:
        if self._probe is None:
            return None
        speed = self._probe()
        self.remember(speed)
        return speed

    def remember(self, speed: Speed | None) -> None:
        """A speed that another look, or an earlier run, has seen."""
        if speed is not None:
            self.best = speed if self.best is None else self.best.faster(speed)

    def calibrate(self) -> None:
        """Some seconds of looks, so that the first run has something to be compared with."""
        if not self.is_blind:
            for _ in range(_CALIBRATION_LOOKS):
                self.look()


def open_gauge() -> Gauge:
    """One that looks with the kernels, and a blind one where weft was installed without them."""
    try:
        return Gauge(SpeedProbe().look)
    except ImportError:
        return Gauge(None)
