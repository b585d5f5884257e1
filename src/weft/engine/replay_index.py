"""Indexes of a whole log for the live page: the events of one request, the next preemption, an overview of all frames."""

from __future__ import annotations

import sqlite3
import threading
from array import array
from collections.abc import Sequence

import msgspec

from weft.live import LiveEvent, LiveFrame
from weft.request import RequestId

MAX_EVENTS_OF_A_REQUEST = 300
"""The most events of a request in one response: its first ones, and its newest one. The page keeps as many."""
MIN_BINS = 500
"""An overview of this many frames or more has at least this many bins, and less than twice as many."""


class EventIndex:
    """Owns a temporary database without a name: the events with the numbers of their frames. One thread appends, others
    read. Memory holds the pages that SQLite caches."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._database = sqlite3.connect("", check_same_thread=False)
        self._database.executescript("""
            PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF;
            CREATE TABLE event (request TEXT, frame INTEGER, kind TEXT, content TEXT);
            CREATE INDEX of_request ON event (request);
            CREATE INDEX preemption ON event (frame) WHERE kind = 'preempted';
        """)

    def append(self, frame: int, events: Sequence[LiveEvent]) -> None:
        rows = [(one.request_id, frame, one.kind, msgspec.json.encode(one)) for one in events]
        with self._lock:
            self._database.executemany("INSERT INTO event VALUES (?, ?, ?, ?)", rows)

    def of_request(self, request_id: RequestId, until: int) -> tuple[list[bytes], int]:
        """The events of a request as JSON, up to the frame `until`, and how many of them are left out."""
        with self._lock:
            rows = self._database.execute(
                "SELECT content FROM event WHERE request = ? AND frame <= ? ORDER BY rowid",
                (request_id, until),
            ).fetchall()
        found = [content for (content,) in rows]
        num_left_out = max(0, len(found) - MAX_EVENTS_OF_A_REQUEST)
        if num_left_out:
            found[MAX_EVENTS_OF_A_REQUEST - 1 : -1] = []
        return found, num_left_out

    def next_preemption(self, after: int) -> int | None:
        """The first frame after the frame `after` that has a preemption."""
        with self._lock:
            (found,) = self._database.execute(
                "SELECT min(frame) FROM event WHERE kind = 'preempted' AND frame > ?", (after,)
            ).fetchone()
        return None if found is None else int(found)

    def close(self) -> None:
        with self._lock:
            self._database.close()


class Overview:
    """Owns a bounded number of bins, each of the same number of frames: the longest step, the largest number of waiting
    requests, the preemptions. One thread adds, others read."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._frames_per_bin = 1
        self._num_frames = 0
        self._step_seconds, self._waiting, self._preemptions = array("d"), array("Q"), array("Q")

    def add(self, frame: LiveFrame) -> None:
        seconds = max((step.seconds for step in frame.steps), default=0.0)
        preemptions = sum(event.kind == "preempted" for event in frame.events)
        with self._lock:
            if self._num_frames % self._frames_per_bin == 0:
                if len(self._waiting) == 2 * MIN_BINS:
                    self._halve()
                self._append(seconds, frame.num_waiting, preemptions)
            else:
                self._step_seconds[-1] = max(self._step_seconds[-1], seconds)
                self._waiting[-1] = max(self._waiting[-1], frame.num_waiting)
                self._preemptions[-1] += preemptions
            self._num_frames += 1

    def _append(self, seconds: float, num_waiting: int, preemptions: int) -> None:
        self._step_seconds.append(seconds)
        self._waiting.append(num_waiting)
        self._preemptions.append(preemptions)

    def _halve(self) -> None:
        """Joins each bin with the next one. The number of bins is even."""
        seconds, waiting, preemptions = self._step_seconds, self._waiting, self._preemptions
        self._step_seconds = array("d", map(max, seconds[::2], seconds[1::2]))
        self._waiting = array("Q", map(max, waiting[::2], waiting[1::2]))
        self._preemptions = array("Q", map(int.__add__, preemptions[::2], preemptions[1::2]))
        self._frames_per_bin *= 2

    def describe(self) -> dict[str, object]:
        """The bins as JSON values."""
        with self._lock:
            return {
                "frames_per_bin": self._frames_per_bin,
                "num_frames": self._num_frames,
                "step_seconds": self._step_seconds.tolist(),
                "waiting": self._waiting.tolist(),
                "preemptions": self._preemptions.tolist(),
            }
