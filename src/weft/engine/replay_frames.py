"""The frames of an event log. A thread replays the log and writes the frames to a temporary file."""

from __future__ import annotations

import math
import os
import sqlite3
import tempfile
import threading
import zlib
from array import array
from collections.abc import Callable

import msgspec

from weft.engine.engine_metrics import EngineMetrics
from weft.engine.live_recorder import LiveRecorder
from weft.engine.replay import LogReplay, ReplayReport
from weft.engine.replay_index import EventIndex, Overview
from weft.errors import WeftError
from weft.request import RequestId

_FRAMES_PER_GROUP = 32
"""Frames that are compressed together. A larger group compresses better, but takes longer to read."""
_LEVEL = 1
_FRAME_SECONDS = 1.0
"""While no step ends, there is a frame for the events of each period of this length."""
_CLOSE_SECONDS = 5.0
_STEP_ENDS = frozenset({"apply", "fail"})


class FrameFile:
    """Owns a temporary file without a name, so nothing is left of it after a crash. One thread appends, others read.

    Only the offsets of the groups, and the frames of the last, incomplete group, are in memory.
    """

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(prefix="weft-replay-")  # noqa: SIM115  # stays open
        self._lock = threading.Lock()
        self._offsets = array("Q", [0])
        """The offset of each group, and the end of the last group."""
        self._last: list[bytes] = []

    def __len__(self) -> int:
        with self._lock:
            return self._num_written + len(self._last)

    @property
    def num_bytes(self) -> int:
        return self._offsets[-1]

    def append(self, frame: bytes) -> None:
        """Appends a frame, which is JSON without line breaks."""
        with self._lock:
            self._last.append(frame)
            if len(self._last) < _FRAMES_PER_GROUP:
                return
            group = self._last
        # Without the lock, so that readers need not wait. They find these frames in `_last` until the group is written.
        packed = zlib.compress(b"\n".join(group), _LEVEL)
        self._write(packed)
        with self._lock:
            self._offsets.append(self._offsets[-1] + len(packed))
            self._last = []

    def read(self, start: int, count: int) -> list[bytes]:
        """Frames from `start` on: `count` of them, or fewer at the end."""
        with self._lock:
            num_written, last = self._num_written, self._last[:]
        frames: list[bytes] = []
        first, end = start // _FRAMES_PER_GROUP, -(-min(start + count, num_written) // _FRAMES_PER_GROUP)
        for group in range(first, end):
            offset, next_offset = self._offsets[group], self._offsets[group + 1]
            packed = os.pread(self._file.fileno(), next_offset - offset, offset)
            frames += zlib.decompress(packed).split(b"\n")
        skipped = start - first * _FRAMES_PER_GROUP if first < end else start - num_written
        return [*frames, *last][skipped : skipped + count]

    def close(self) -> None:
        self._file.close()

    @property
    def _num_written(self) -> int:
        return (len(self._offsets) - 1) * _FRAMES_PER_GROUP

    def _write(self, packed: bytes) -> None:
        left = memoryview(packed)
        offset = self._offsets[-1]
        while left:
            written = os.pwrite(self._file.fileno(), left, offset)
            left, offset = left[written:], offset + written


class ReplayFrames:
    """Owns the thread, the file and the index. The constructor reads the first line of the log, `start` begins the replay.

    There is a frame for each step that ended, and for the events of each second in which none ended.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._log = LogReplay(path)
        self._metrics = EngineMetrics(self._log.scheduler, self._log.now)
        self._recorder = LiveRecorder(self._log.scheduler, self._metrics, lapse=math.inf)
        self.info = self._recorder.info()
        self._file = FrameFile()
        self._index = EventIndex()
        self._overview = Overview()
        self._encoder = msgspec.json.Encoder()
        self._thread = threading.Thread(target=self._run, name="weft-replay", daemon=True)
        self._stopping = False
        self._on_end: Callable[[], object] = lambda: None
        self.is_complete = False
        """Whether there will be no more frames."""
        self.problem: str | None = None
        """What is wrong with the log, if the frames end earlier than the run did."""

    @property
    def num_frames(self) -> int:
        return len(self._file)

    @property
    def num_bytes(self) -> int:
        """Bytes of the temporary file."""
        return self._file.num_bytes

    @property
    def progress(self) -> float:
        """The part of the log that was replayed, from 0 to 1."""
        return self._log.progress

    @property
    def report(self) -> ReplayReport:
        return self._log.report

    def start(self, on_end: Callable[[], object] = lambda: None) -> None:
        """Begins the replay. `on_end` is called by its thread when there will be no more frames."""
        self._on_end = on_end
        self._thread.start()

    def read(self, start: int, count: int) -> list[bytes]:
        """Frames as JSON, from `start` on: `count` of them, or fewer at the end."""
        return self._file.read(start, count)

    def events_of(self, request_id: RequestId, until: int) -> tuple[list[bytes], int]:
        """The events of a request as JSON, up to the frame `until`, and how many of them are left out."""
        return self._index.of_request(request_id, until)

    def next_preemption(self, after: int) -> int | None:
        """The first frame after the frame `after` that has a preemption."""
        return self._index.next_preemption(after)

    def overview(self) -> dict[str, object]:
        """Figures of the whole log for the overview of the page, one for each bin of successive frames. JSON values."""
        return self._overview.describe()

    def close(self) -> None:
        self._stopping = True
        if self._thread.is_alive():
            self._thread.join(_CLOSE_SECONDS)
            if self._thread.is_alive():
                return  # the log is a pipe whose writer sends nothing; the thread ends with the process
        self._log.close()
        self._file.close()
        self._index.close()

    def _run(self) -> None:
        try:
            self._make_frames()
            if self.report.is_cut:
                self.problem = f"{self.path} ends within a line: the engine was killed, or still writes to it"
        except WeftError as error:
            self.problem = str(error)
        except (OSError, sqlite3.Error) as error:
            reason = getattr(error, "strerror", None) or error
            self.problem = f"no more frames can be kept in {tempfile.gettempdir()}: {reason}"
        self.is_complete = True
        if not self._stopping:
            self._on_end()

    def _make_frames(self) -> None:
        scheduler = self._log.scheduler
        self._recorder.start(self._log.now)
        last_at = -math.inf
        is_shown = False
        for event in self._log.events():
            _, results = scheduler.take_outputs()
            self._metrics.record(results, self._log.now)
            is_due = self._log.has_time and self._log.now - last_at >= _FRAME_SECONDS
            is_shown = event["event"] in _STEP_ENDS or is_due
            if is_shown:
                self._append_frame()
                last_at = self._log.now
            if self._stopping:
                return
        if not is_shown:
            self._append_frame()

    def _append_frame(self) -> None:
        frame = self._recorder.frame(self._log.now)
        # The index is first, so that it has the events of each frame that the file has.
        self._index.append(len(self._file), frame.events)
        self._overview.add(frame)
        self._file.append(self._encoder.encode(frame))
