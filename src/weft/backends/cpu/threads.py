"""The number of compute threads. The default is one per physical core that this process may use."""

from __future__ import annotations

import os
from pathlib import Path

from weft.errors import InvalidRequestError

_MOST_THREADS = 1024


def thread_count(threads: int | None) -> int:
    """Returns `threads` if it is valid, and the default for None."""
    if threads is None:
        return max(1, min(_physical_cores(), _quota()))
    if not isinstance(threads, int) or isinstance(threads, bool) or not 1 <= threads <= _MOST_THREADS:
        raise InvalidRequestError(
            f"threads is {threads!r}; allowed: a whole number from 1 to {_MOST_THREADS}", field="threads"
        )
    return threads


def _physical_cores() -> int:
    """The number of usable cores. Hardware threads of one core count once: they share its arithmetic units, and slow
    each other down."""
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    cores = set()
    for number in os.sched_getaffinity(0):
        siblings = Path(f"/sys/devices/system/cpu/cpu{number}/topology/thread_siblings_list")
        try:
            cores.add(siblings.read_text().strip())
        except OSError:
            cores.add(str(number))
    return len(cores)


def _quota() -> int:
    """The CPU limit of the container, in whole processors."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return _MOST_THREADS if quota == "max" else max(1, int(quota) // int(period))
    except (OSError, ValueError):
        return _MOST_THREADS
