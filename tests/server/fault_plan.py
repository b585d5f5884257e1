"""The faults of a fault run, drawn from its seed, and the errors that each fault explains."""

from __future__ import annotations

import enum
import random
from dataclasses import dataclass, field


class Fault(enum.Enum):
    BRIEF_STOP = "the engine stopped (SIGSTOP) and continued in time"
    LONG_STOP = "the engine stopped (SIGSTOP) until it is replaced"
    KILLED_ENGINE = "the engine killed"
    KILLED_WORKER = "a worker process killed"
    NO_DESCRIPTORS = "the engine killed while the server has no descriptor left (EMFILE)"
    NO_FORK = "the engine killed while no process can be started (ENOMEM)"
    FULL_DISK = "the engine's log cannot grow (ENOSPC, or EFBIG where no file system can be mounted)"
    STALLED_READERS = "streams whose clients do not read"
    LEAVERS = "clients that disconnect while their body, text, template or grammar is processed"
    CLOCK_JUMP = "the wall clock jumps by days, both ways"
    FLIPPED_WEIGHTS = "bits of the packed weights flipped, then the engine killed"
    CUT_WEIGHTS = "the packed weights cut short, then the engine killed"


OF_WEIGHTS = (Fault.FLIPPED_WEIGHTS, Fault.CUT_WEIGHTS)
SHOWN_BY_HEALTH = {Fault.LONG_STOP, Fault.KILLED_ENGINE, Fault.NO_FORK, *OF_WEIGHTS}
"""After these faults `/health` must return 503 at least once, and 200 in the end. NO_DESCRIPTORS is missing: without
descriptors the server may not accept the connection of a probe."""

_OF_AN_ENGINE = frozenset({"engine_died", "engine_not_ready", "engine_stalled", "unnamed"})
_OF_A_WORKER = frozenset({"failed", "engine_not_ready", "unnamed"})
_EXPLAINED = {
    Fault.BRIEF_STOP: frozenset({"engine_not_ready", "unnamed"}),
    Fault.CLOCK_JUMP: frozenset({"batch expired", "response_not_found"}),  # both expire by the wall clock
    Fault.KILLED_WORKER: _OF_A_WORKER,
    Fault.NO_DESCRIPTORS: _OF_AN_ENGINE | _OF_A_WORKER | {"lost", "storage_failed"},
    Fault.NO_FORK: _OF_AN_ENGINE | _OF_A_WORKER,
    **dict.fromkeys((Fault.LONG_STOP, Fault.KILLED_ENGINE, *OF_WEIGHTS), _OF_AN_ENGINE),
}


@dataclass
class Window:
    """The time from the first effect of a fault to the recovery of the server. `ended` is None while it lasts."""

    fault: Fault
    began: float
    ended: float | None = None

    def covers(self, began: float, ended: float) -> bool:
        return began <= (float("inf") if self.ended is None else self.ended) and self.began <= ended

    def explains(self, code: str) -> bool:
        return code in _EXPLAINED.get(self.fault, frozenset())


@dataclass(frozen=True)
class Plan:
    """One run: its faults in order, and the random generator for all other choices."""

    seed: int
    faults: tuple[Fault, ...]
    source: random.Random = field(repr=False)


def draw_plan(seed: int, backend: str, count: int | None = None) -> Plan:
    """All faults that the backend supports, in an order that depends on the seed; with `count`, only the first ones."""
    source = random.Random(f"faults {seed} {backend}")
    # A real model generates too slowly to fill the buffers of a reader that does not read.
    others = (Fault.STALLED_READERS,) if backend == "cpu" else OF_WEIGHTS
    faults = [fault for fault in Fault if fault not in others]
    source.shuffle(faults)
    if backend == "cpu" and count is not None:  # faults that only a real model has come first
        faults.sort(key=lambda fault: fault not in OF_WEIGHTS)
    return Plan(seed, tuple(faults[:count]), source)
