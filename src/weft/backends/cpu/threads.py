"""How many threads compute, where nobody says: one for each physical core that this process may use."""

from __future__ import annotations

import os
from pathlib import Path

from weft.errors import InvalidRequestError

_MOST_THREADS = 1024


def thread_count(wanted: int | None) -> int:
    """`wanted` if it is a number of threads, else the default."""
    if wanted is None:
        return max(1, min(_physical_cores(), _quota()))
    if not isinstance(wanted, int) or isinstance(wanted, bool) or not 1 <= wanted <= _MOST_THREADS:
        raise InvalidRequestError(
            f"threads is {wanted!r}; allowed: a whole number from 1 to {_MOST_THREADS}", field="threads"
        )
    return wanted


def _physical_cores() -> int:
    """Two hardware threads of one core share its arithmetic: a second one only gets in the way of the first."""
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
    """What a container's limit on processor time comes to, in whole processors."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return _MOST_THREADS if quota == "max" else max(1, int(quota) // int(period))
    except (OSError, ValueError):
        return _MOST_THREADS
