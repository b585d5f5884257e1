"""Distinguishes a stuck engine from a slow one. Owns the time since the engine's process last made progress.

The process sends a heartbeat twice a second. A heartbeat shows progress if two threads made progress: the engine's loop
is idle or has finished a step, and the reader is idle or has handled a message. If no heartbeat shows progress, the CPU
time of the process is measured, then that of its children (compilers). A slow step uses CPU time, a stuck one does not.
Waiting for a GPU uses CPU time too, so CPU time does not extend a wait: each one is limited to `stall_seconds`.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from weft.clock import Clock
from weft.engine.ipc import wire

HEARTBEAT_SECONDS = 0.5
CHECK_SECONDS = 0.3
"""Interval of `Liveness.check`. Together with `SILENT_SECONDS` it detects a stopped process within 2 s."""
SILENT_SECONDS = 1.4
_GRACE_SECONDS = 0.6
"""CPU time is measured only after this long without progress. Heartbeats and checks are not synchronised, so one check
without a new heartbeat is normal."""
_SLOW_FACTOR = 10
"""A loop that uses CPU time but finishes no step for this many times `stall_seconds` is stuck: it may loop forever."""
_LEAST_WORK_SECONDS, _LEAST_WORK_SHARE = 0.05, 0.01
"""CPU time counts as progress only above these seconds plus this fraction of the quiet time. Idle threads of libraries
wake up too and use a little CPU time."""
_SECONDS_PER_PAGE = 0.01
"""A page read from disk counts as this much CPU time. A step that waits for its weights to be read makes progress, but
uses little CPU time."""
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_UNREADABLE = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Errors of reading `/proc` that mean a shortage of descriptors or memory. They say nothing about the process."""


class Liveness:
    """Decides whether one process is stuck. `check` is called every `CHECK_SECONDS`."""

    def __init__(
        self,
        stall_seconds: float,
        clock: Clock,
        work: Callable[[tuple[int, ...]], float],
        work_of_children: Callable[[], float],
    ) -> None:
        """`work` returns the CPU time of the process, excluding the threads with the given ids."""
        self.is_started = False
        """The client sets it when the engine is ready. Until then there are no steps, and the start may take any time
        while it uses CPU time."""
        self.quiet_seconds = 0.0
        """Seconds since the process last made progress."""
        self._unfinished_seconds = 0.0
        """Time since the loop last finished a step or was idle."""
        self._waiting_seconds = 0.0
        """Time for which every heartbeat said that the loop waits for the GPU, without a finished step."""
        self._stall_seconds = stall_seconds
        self._clock = clock
        self._checked_at = clock()
        self._has_progress = True
        self._heartbeat: wire.Heartbeat | None = None
        self._measures = (lambda: work(self._heartbeat.threads if self._heartbeat else ()), work_of_children)
        """Two functions: one returns the CPU time of the process, the other that of its children."""
        self._work_before: list[float] = []
        """The results of the first calls of `_measures` since the last progress."""

    @property
    def is_silent(self) -> bool:
        return self.quiet_seconds >= SILENT_SECONDS

    @property
    def is_stalled(self) -> bool:
        return (
            max(self.quiet_seconds, self._waiting_seconds) >= self._stall_seconds
            or self._unfinished_seconds >= _SLOW_FACTOR * self._stall_seconds
        )

    def on_step(self) -> None:
        """Notes progress: the engine has reported a step."""
        self._has_progress = True

    def on_heartbeat(self, heartbeat: wire.Heartbeat) -> None:
        before, self._heartbeat = self._heartbeat, heartbeat
        if not heartbeat.waits_for_device or before is None or before.loop != heartbeat.loop:
            self._waiting_seconds = 0.0
        if before is None or (
            _has_advanced(before.loop, heartbeat.loop) and _has_advanced(before.reader, heartbeat.reader)
        ):
            self._has_progress = True

    def check(self) -> None:
        """Updates the times without progress. If no step or heartbeat shows progress, measures CPU time."""
        now = self._clock()
        # If this check is late, the client's own process was stopped and received no heartbeats: count little time.
        elapsed, self._checked_at = min(now - self._checked_at, 2 * CHECK_SECONDS), now
        if self._has_progress:
            self._has_progress = False
            self.quiet_seconds = self._unfinished_seconds = self._waiting_seconds = 0.0
            self._work_before.clear()
            return
        self.quiet_seconds += elapsed
        self._unfinished_seconds += elapsed if self.is_started else 0.0
        if self._heartbeat is not None and self._heartbeat.waits_for_device:
            self._waiting_seconds += elapsed
        if self.quiet_seconds >= _GRACE_SECONDS and self._has_worked():
            self.quiet_seconds = 0.0
            self._work_before.clear()

    def _has_worked(self) -> bool:
        """Whether the process or its children used enough CPU time since the first measurement. The children are
        measured only if the process used too little: finding them reads all of `/proc`."""
        least = _LEAST_WORK_SECONDS + _LEAST_WORK_SHARE * self.quiet_seconds
        for number, measure in enumerate(self._measures):
            try:
                seconds = measure()
            except OSError:
                return True  # without descriptors /proc cannot be read; assume progress rather than kill the engine
            if number == len(self._work_before):
                self._work_before.append(seconds)
                return False
            if seconds - self._work_before[number] >= least:
                return True
        return False


def _has_advanced(before: int | None, now: int | None) -> bool:
    """Whether a thread is idle (None), or its number in the heartbeat has changed."""
    return now is None or now != before


def work_of(process_id: int, without: tuple[int, ...] = ()) -> float:
    """CPU seconds of a process and its ended children, plus time for pages read from disk. Excludes the threads with
    the ids `without`."""
    process = Path(f"/proc/{process_id}")
    own, of_children = _work(process / "stat")
    return own + of_children - sum(_work(process / f"task/{thread}/stat")[0] for thread in without)


def work_of_children(process_id: int) -> float:
    """The sum of `work_of` over all running descendants of the process."""
    parents = dict(_parents())
    found = {process_id}
    while new := {child for child, parent in parents.items() if parent in found} - found:
        found |= new
    return sum(work_of(child) for child in found - {process_id})


def state_of(process_id: int) -> str:
    """The kernel's letter for the state of a process (T: stopped). Empty if the process is gone or cannot be read."""
    try:
        return "".join(_fields(Path(f"/proc/{process_id}/stat"))[:1])
    except OSError:
        return ""


def _parents() -> Iterator[tuple[int, int]]:
    for path in Path("/proc").glob("[0-9]*/stat"):
        if fields := _fields(path):
            yield int(path.parent.name), int(fields[1])


def _work(stat: Path) -> tuple[float, float]:
    """Work of the process or thread itself, and of the ended children of its process."""
    if not (fields := _fields(stat)):
        return 0.0, 0.0
    pages, child_pages, user, system, child_user, child_system = map(int, fields[9:15])
    return (
        pages * _SECONDS_PER_PAGE + (user + system) / _TICKS_PER_SECOND,
        child_pages * _SECONDS_PER_PAGE + (child_user + child_system) / _TICKS_PER_SECOND,
    )


def _fields(stat: Path) -> list[str]:
    """The fields after the process name, which may contain spaces and brackets. Empty if the process is gone."""
    try:
        return stat.read_text(errors="replace").rpartition(")")[2].split()
    except OSError as error:
        if error.errno in _UNREADABLE:
            raise
        return []
