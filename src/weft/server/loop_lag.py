"""Measures the lag of the event loop: how late its timers run. Run delay, caused by other programs, is subtracted."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

_PERIOD_SECONDS = 0.01
_PAUSE_SECONDS = 0.19
"""Between two measurements. Each wake-up of the event loop takes a core from the kernels: 100 a second cost 1% of the throughput on
two cores."""
_IDLE_SECONDS = 0.25
_SCHEDSTAT = "/proc/thread-self/schedstat"


async def watch_lag(observe: Callable[[float], object], is_busy: Callable[[], bool]) -> None:
    """Sleeps for one period, five times a second, and calls `observe` with the seconds by which each wake-up was late.
    Measures only while `is_busy()` is true.

    Run delay is the time for which this thread was runnable and the kernel ran other threads instead. The run delay
    of the whole sleep is subtracted, because the work of the server did not cause it. A part of it may lie before the
    timer expired. The lag is then underestimated, by at most one period.
    """
    loop = asyncio.get_running_loop()
    try:
        schedstat = os.open(_SCHEDSTAT, os.O_RDONLY)
    except OSError:  # the kernel does not report run delay: nothing is subtracted
        schedstat = -1
    try:
        while True:
            if not is_busy():
                await asyncio.sleep(_IDLE_SECONDS)
                continue
            expected, delay_before = loop.time() + _PERIOD_SECONDS, _run_delay(schedstat)
            await asyncio.sleep(_PERIOD_SECONDS)
            observe(max(0.0, loop.time() - expected - (_run_delay(schedstat) - delay_before)))
            await asyncio.sleep(_PAUSE_SECONDS)
    finally:
        if schedstat >= 0:
            os.close(schedstat)


def _run_delay(schedstat: int) -> float:
    """Seconds for which the thread was runnable but not running."""
    return int(os.pread(schedstat, 128, 0).split()[1]) / 1e9 if schedstat >= 0 else 0.0
