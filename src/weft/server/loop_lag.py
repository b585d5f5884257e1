"""How late the event loop is, apart from the time for which the kernel let its thread wait."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

_PERIOD_SECONDS = 0.01
_IDLE_SECONDS = 0.25
_SCHEDSTAT = "/proc/thread-self/schedstat"


async def watch_lag(observe: Callable[[float], object], is_busy: Callable[[], bool]) -> None:
    """Calls `observe` again and again with the seconds by which a timer was late, less the run delay of this thread since the
    timer was set: time that other programs on the machine took. Run delay before the timer was due is subtracted too,
    so a lag may look shorter than it was, by one period at most. Nothing is measured while `is_busy` returns False."""
    loop = asyncio.get_running_loop()
    try:
        schedstat = os.open(_SCHEDSTAT, os.O_RDONLY)
    except OSError:  # the kernel does not report it: all lateness counts
        schedstat = -1
    try:
        while True:
            if not is_busy():
                await asyncio.sleep(_IDLE_SECONDS)
                continue
            expected, delay_before = loop.time() + _PERIOD_SECONDS, _run_delay(schedstat)
            await asyncio.sleep(_PERIOD_SECONDS)
            observe(max(0.0, loop.time() - expected - (_run_delay(schedstat) - delay_before)))
    finally:
        if schedstat >= 0:
            os.close(schedstat)


def _run_delay(schedstat: int) -> float:
    """Seconds for which the thread was ready to run and did not run."""
    return int(os.pread(schedstat, 128, 0).split()[1]) / 1e9 if schedstat >= 0 else 0.0
