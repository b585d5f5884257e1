"""Tells a stuck engine from a slow one. Owns the time since the engine's process last showed that it works.

The process sends a beat twice a second. A beat shows life when the loop waits for requests or has finished a step since
the beat before, and the same holds for the thread that reads messages. Where no beat shows it, the processor time of the
process is looked at, then that of its children (compilers): a slow step computes, one that is stuck does not.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from weft.clock import Clock
from weft.engine.ipc import wire

BEAT_SECONDS = 0.5
LOOK_SECONDS = 0.3
"""Between two looks; with `SILENT_SECONDS` a stopped process is found within 2 s."""
SILENT_SECONDS = 1.4
_DOUBT_SECONDS = 0.6
"""Beats and looks are not in step: a look without a new beat means nothing yet."""
_SLOW_FACTOR = 10
"""A loop that computes and finishes no step is stuck after so many times `stall_seconds`: it may wait for a card in a
busy loop, or run in circles."""
_LEAST_WORK_SECONDS, _LEAST_WORK_SHARE = 0.05, 0.01
"""Less processor time than this plus this share of the quiet time is no work: idle threads of libraries wake up too."""
_SECONDS_PER_PAGE = 0.01
"""What counts for a page that was read from disk: a step that waits for its weights makes progress."""
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_UNREADABLE = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Of errors at `/proc`, those that say nothing of the process."""


class Liveness:
    """Of one process. `look` is called every `LOOK_SECONDS`."""

    def __init__(
        self,
        stall_seconds: float,
        clock: Clock,
        work: Callable[[tuple[int, ...]], float],
        work_of_children: Callable[[], float],
    ) -> None:
        """`work` is the processor time of the process without that of the threads with these ids."""
        self.is_started = False
        """Set by the client once the loop runs: a start has no steps to finish, and may take as long as it computes."""
        self.quiet_seconds = 0.0
        """Since the last sign of life."""
        self._unfinished_seconds = 0.0
        """Since the loop last finished a step or waited for requests."""
        self._stall_seconds = stall_seconds
        self._clock = clock
        self._looked_at = clock()
        self._has_moved = True
        self._beat: wire.Beat | None = None
        self._measures = (lambda: work(self._beat.threads if self._beat else ()), work_of_children)
        self._work_before: list[float] = []

    @property
    def is_silent(self) -> bool:
        return self.quiet_seconds >= SILENT_SECONDS

    @property
    def is_stalled(self) -> bool:
        return (
            self.quiet_seconds >= self._stall_seconds
            or self._unfinished_seconds >= _SLOW_FACTOR * self._stall_seconds
        )

    def moved(self) -> None:
        """A step was reported."""
        self._has_moved = True

    def hear(self, beat: wire.Beat) -> None:
        before, self._beat = self._beat, beat
        if before is None or (_has_moved(before.loop, beat.loop) and _has_moved(before.reader, beat.reader)):
            self._has_moved = True

    def look(self) -> None:
        now = self._clock()
        # A look that is late means that this process stood still itself, and could not have heard a beat.
        elapsed, self._looked_at = min(now - self._looked_at, 2 * LOOK_SECONDS), now
        if self._has_moved:
            self._has_moved = False
            self.quiet_seconds = self._unfinished_seconds = 0.0
            self._work_before.clear()
            return
        self.quiet_seconds += elapsed
        self._unfinished_seconds += elapsed if self.is_started else 0.0
        if self.quiet_seconds >= _DOUBT_SECONDS and self._has_worked():
            self.quiet_seconds = 0.0
            self._work_before.clear()

    def _has_worked(self) -> bool:
        """Since the first look after `_DOUBT_SECONDS`. The search for children reads all of `/proc`, so it comes last."""
        least = _LEAST_WORK_SECONDS + _LEAST_WORK_SHARE * self.quiet_seconds
        for number, measure in enumerate(self._measures):
            try:
                seconds = measure()
            except OSError:
                return (
                    True  # the server has no descriptor left for /proc: what cannot be measured is no stall
                )
            if number == len(self._work_before):
                self._work_before.append(seconds)
                return False
            if seconds - self._work_before[number] >= least:
                return True
        return False


def _has_moved(before: int | None, now: int | None) -> bool:
    return now is None or now != before


def work_of(process_id: int, without: tuple[int, ...] = ()) -> float:
    """Seconds that a process has computed, or waited for pages from disk; `without` names threads of it."""
    process = Path(f"/proc/{process_id}")
    own, of_children = _work(process / "stat")
    return own + of_children - sum(_work(process / f"task/{thread}/stat")[0] for thread in without)


def work_of_children(process_id: int) -> float:
    """The same of all processes that it started, and that those started."""
    parents = dict(_parents())
    found = {process_id}
    while new := {child for child, parent in parents.items() if parent in found} - found:
        found |= new
    return sum(work_of(child) for child in found - {process_id})


def state_of(process_id: int) -> str:
    """The kernel's letter for the state of a process: T is stopped; empty where the process is gone, or cannot be looked at."""
    try:
        return "".join(_fields(Path(f"/proc/{process_id}/stat"))[:1])
    except OSError:
        return ""


def _parents() -> Iterator[tuple[int, int]]:
    for path in Path("/proc").glob("[0-9]*/stat"):
        if fields := _fields(path):
            yield int(path.parent.name), int(fields[1])


def _work(stat: Path) -> tuple[float, float]:
    """Its own, and that of the children of its process that have ended."""
    if not (fields := _fields(stat)):
        return 0.0, 0.0
    pages, child_pages, user, system, child_user, child_system = map(int, fields[9:15])
    return (
        pages * _SECONDS_PER_PAGE + (user + system) / _TICKS_PER_SECOND,
        child_pages * _SECONDS_PER_PAGE + (child_user + child_system) / _TICKS_PER_SECOND,
    )


def _fields(stat: Path) -> list[str]:
    """Those after the name, which may hold anything; none where it is gone."""
    try:
        return stat.read_text(errors="replace").rpartition(")")[2].split()
    except OSError as error:
        if error.errno in _UNREADABLE:
            raise
        return []
