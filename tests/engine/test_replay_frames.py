"""The frames of an event log are those that the engine would have shown, for any log and in any order."""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import os
import random
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from recorded_run import record

from weft import __version__
from weft.backends.noop import NoopBackend
from weft.clock import Clock, VirtualClock
from weft.config import SchedulerConfig, ServingEngineConfig
from weft.engine.live_recorder import LiveRecorder
from weft.engine.replay import LOG_VERSION, ReplayDifference, RunRecorder, UnreadableLogError, replay
from weft.engine.replay_frames import FrameFile, ReplayFrames
from weft.engine.replay_index import MIN_BINS, EventIndex, Overview
from weft.engine.serving import ServingEngine
from weft.live import LiveEvent, LiveFrame, LiveStep
from weft.plan import BackendInfo
from weft.request import InferenceRequest, RequestId, SamplingParams
from weft.scheduling.sequence import Sequence

HISTOGRAMS = ("first_token_counts", "gap_counts")
"""Not compared: the engine counts a step after the frame with it, the replay before."""


class Watched:
    """Makes a frame after each step of a running engine."""

    def __init__(self) -> None:
        self.frames: list[LiveFrame] = []

    def __call__(self, engine: ServingEngine, clock: Clock) -> None:
        recorder = LiveRecorder(engine.scheduler, engine._metrics, lapse=math.inf)
        recorder.start(clock())

        def watched(call: Callable[..., None]) -> Callable[..., None]:
            def called(*arguments: Any) -> None:
                call(*arguments)
                self.frames.append(recorder.frame(clock()))

            return called

        for name in ("apply", "fail"):
            setattr(engine.scheduler, name, watched(getattr(engine.scheduler, name)))


@contextmanager
def replayed(path: Path) -> Iterator[ReplayFrames]:
    """The frames of a log, when all of them are made."""
    frames = ReplayFrames(str(path))
    try:
        frames.start()
        frames._thread.join()
        assert frames.is_complete
        yield frames
    finally:
        frames.close()


def all_of(frames: ReplayFrames) -> list[dict[str, Any]]:
    return [json.loads(frame) for frame in frames.read(0, frames.num_frames)]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """A log, and the frames after each step that was applied or failed in the recorded run."""
    path, watched = tmp_path_factory.mktemp("log") / "run.jsonl", Watched()
    record(path, watch=watched)
    return path, [msgspec.json.decode(msgspec.json.encode(frame)) for frame in watched.frames]


def test_the_first_frame_has_the_time_of_the_first_clock_reading(tmp_path: Path) -> None:
    """A server plans once before its first request arrives. That reads no clock."""
    path, clock = tmp_path / "log", VirtualClock()
    clock.advance(1000.0)
    config = ServingEngineConfig(log_path=str(path))
    engine = ServingEngine(NoopBackend(), config, clock=clock)
    engine.run_iteration()
    engine.submit(InferenceRequest((3, 4, 5), SamplingParams(max_tokens=2)))
    engine.run_until_idle()
    engine.stop()
    with replayed(path) as frames:
        assert {frame["at"] for frame in all_of(frames)} == {1000.0}


def is_of_a_step(frames: list[dict[str, Any]], index: int) -> bool:
    failed = [frame["totals"]["steps_failed"] for frame in frames]
    return bool(frames[index]["steps"]) or failed[index] > (failed[index - 1] if index else 0)


def test_a_replay_shows_what_the_engine_would_have_shown_after_each_step(
    run: tuple[Path, list[dict[str, Any]]],
) -> None:
    path, shown = run
    with replayed(path) as frames:
        found = all_of(frames)
        assert frames.problem is None and frames.progress == 1
    of_steps = [frame for index, frame in enumerate(found) if is_of_a_step(found, index)]
    assert len(of_steps) == len(shown) > 100
    for mine, its in zip(of_steps, shown, strict=True):
        different = {name for name, value in its.items() if mine[name] != value}
        # A frame for a second without a step takes the events before it. A failed step reads no clock.
        assert different <= {*HISTOGRAMS, "events", *(() if its["steps"] else ("at",))}, different
    events = [event for frame in found for event in frame["events"]]
    assert events[: sum(len(frame["events"]) for frame in shown)] == [
        event for frame in shown for event in frame["events"]
    ]
    kinds = {event[2] for event in events}
    assert {
        "queued",
        "admitted",
        "chunk",
        "preempted",
        "swapped_in",
        "first_token",
        "finished",
        "failed",
    } <= kinds
    last = found[-1]
    assert last["requests"] == [] and last["num_running"] == last["num_waiting"] == last["blocks_used"] == 0
    assert last["totals"]["tokens_generated"] == sum(last["gap_counts"].values()) + sum(
        event[2] == "first_token" for event in events
    )
    assert sum(last["first_token_counts"].values()) == sum(event[2] == "first_token" for event in events)


def test_the_info_is_that_of_the_engine_of_the_log(run: tuple[Path, list[dict[str, Any]]]) -> None:
    with replayed(run[0]) as frames:
        info = frames.info
    assert (info.num_blocks, info.block_size, info.swap_blocks, info.num_rows) == (16, 4, 8, 4)
    assert info.policy == "adaptive" and info.step_target == SchedulerConfig().target_inter_token_latency


def test_frames_read_in_any_order_equal_those_read_in_sequence(
    run: tuple[Path, list[dict[str, Any]]],
) -> None:
    source = random.Random(1)
    with replayed(run[0]) as frames:
        number = frames.num_frames
        sequential = [frame for index in range(number) for frame in frames.read(index, 1)]
        assert len(sequential) == number > 64
        for _ in range(500):
            start, count = source.randrange(number), source.randrange(1, 100)
            assert frames.read(start, count) == sequential[start : start + count]
        assert frames.read(number, 5) == []


def test_the_index_has_the_events_of_each_request_up_to_any_frame(
    run: tuple[Path, list[dict[str, Any]]],
) -> None:
    source = random.Random(4)
    with replayed(run[0]) as frames:
        found = all_of(frames)
        names = {event[3] for frame in found for event in frame["events"]}
        for name in sorted(names):
            until = source.randrange(len(found))
            mine = [event for frame in found[: until + 1] for event in frame["events"] if event[3] == name]
            events, num_left_out = frames.events_of(name, until)
            assert [json.loads(event) for event in events] == mine and num_left_out == 0
        assert frames.events_of(RequestId("no such request"), len(found) - 1) == ([], 0)


def test_of_many_events_of_a_request_the_first_ones_and_the_newest_are_read() -> None:
    index = EventIndex()
    try:
        for frame in range(1000):
            chunk = LiveEvent(float(frame), frame, "chunk", RequestId("long"), 8 * frame, 8)
            index.append(frame, [chunk, chunk._replace(request_id=RequestId("other"))])
        events, num_left_out = index.of_request(RequestId("long"), 899)
    finally:
        index.close()
    assert [json.loads(event)[1] for event in events] == [*range(299), 899]
    assert num_left_out == 900 - 300


def test_the_next_preemption_is_found_from_each_frame(run: tuple[Path, list[dict[str, Any]]]) -> None:
    with replayed(run[0]) as frames:
        kinds = [{event[2] for event in frame["events"]} for frame in all_of(frames)]
        preempted = [index for index, found in enumerate(kinds) if "preempted" in found]
        assert len(preempted) > 3
        for after in range(len(kinds)):
            expected = next((index for index in preempted if index > after), None)
            assert frames.next_preemption(after) == expected


@pytest.mark.parametrize("num_frames", [1, 2 * MIN_BINS, 2 * MIN_BINS + 1, 9999])
def test_the_overview_has_a_bounded_number_of_bins_and_loses_nothing(
    num_frames: int, run: tuple[Path, list[dict[str, Any]]]
) -> None:
    source = random.Random(num_frames)
    template = msgspec.convert(run[1][-1], LiveFrame, strict=False)
    overview, seconds, waiting, preemptions = Overview(), [], [], []
    for number in range(num_frames):
        seconds.append(source.random())
        waiting.append(source.randrange(50))
        preemptions.append(source.randrange(3))
        event = LiveEvent(0.0, number, "preempted", RequestId("one"))
        overview.add(
            dataclasses.replace(
                template,
                steps=(LiveStep(number, seconds[-1], 1, 0, 0, 0),),
                num_waiting=waiting[-1],
                events=(event,) * preemptions[-1],
            )
        )
    found: Any = overview.describe()
    size = found["frames_per_bin"]
    starts = range(0, num_frames, size)
    assert len(starts) <= 2 * MIN_BINS and (size == 1 or len(starts) > MIN_BINS)
    assert found["num_frames"] == num_frames
    assert found["step_seconds"] == [max(seconds[start : start + size]) for start in starts]
    assert found["waiting"] == [max(waiting[start : start + size]) for start in starts]
    assert found["preemptions"] == [sum(preemptions[start : start + size]) for start in starts]


def test_frames_can_be_read_while_others_are_added() -> None:
    file = FrameFile()
    try:
        for number in range(200):
            assert len(file) == number
            start = max(0, number - 70)
            expected = [b"%d" % index for index in range(start, number)]
            assert file.read(start, 100) == expected
            file.append(b"%d" % number)
    finally:
        file.close()


def test_the_memory_of_many_frames_is_a_few_of_them() -> None:
    source = random.Random(2)
    file = FrameFile()
    tracemalloc.start()
    try:
        for _ in range(4000):
            file.append(source.randbytes(2000).hex().encode())
        _, peak = tracemalloc.get_traced_memory()
        assert len(file.read(0, 4000)) == 4000
    finally:
        tracemalloc.stop()
        file.close()
    assert file.num_bytes > 8 << 20 and peak < 1 << 20


def test_a_replay_keeps_no_output_of_the_scheduler(run: tuple[Path, list[dict[str, Any]]]) -> None:
    with replayed(run[0]) as frames:
        scheduler = frames._log.scheduler
        assert not scheduler.has_outputs and not scheduler.tokens.token_gaps and not scheduler.sequences


def test_requests_that_wait_while_no_step_ends_are_shown_each_second(tmp_path: Path) -> None:
    clock = VirtualClock(100.0)
    info = BackendInfo(
        vocabulary_size=100, max_context=64, num_blocks=8, block_size=4, swap_blocks=0, bytes_per_block=1
    )
    recorder = RunRecorder(str(tmp_path / "stalled.log"), SchedulerConfig(), info, clock)
    for number in range(50):
        request = InferenceRequest((1, 2), SamplingParams(max_tokens=2), request_id=RequestId(str(number)))
        recorder.scheduler.add(Sequence(request, 1))
        clock.advance(0.25)
    recorder.close()
    with replayed(tmp_path / "stalled.log") as frames:
        found = all_of(frames)
    assert [frame["num_waiting"] for frame in found] == [*range(1, 50, 4), 50]
    assert [frame["at"] for frame in found[:3]] == [100.0, 101.0, 102.0]


def test_a_log_without_events_has_one_frame(tmp_path: Path, run: tuple[Path, list[dict[str, Any]]]) -> None:
    path = tmp_path / "start.log"
    path.write_text(run[0].read_text().splitlines(keepends=True)[0])
    with replayed(path) as frames:
        (frame,) = all_of(frames)
        assert frame["requests"] == [] and frames.problem is None


def test_a_cut_log_has_the_frames_up_to_the_cut(
    tmp_path: Path, run: tuple[Path, list[dict[str, Any]]]
) -> None:
    path = tmp_path / "cut.log"
    content = run[0].read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with replayed(run[0]) as whole, replayed(path) as frames:
        assert frames.problem is not None and "ends within a line" in frames.problem
        number = frames.num_frames
        assert 50 < number < whole.num_frames
        assert frames.read(0, number - 1) == whole.read(0, number - 1)


@pytest.mark.parametrize("is_reading_lost", [False, True])
def test_a_log_that_differs_from_its_replay_has_the_frames_before_that(
    tmp_path: Path, run: tuple[Path, list[dict[str, Any]]], is_reading_lost: bool
) -> None:
    events = [json.loads(line) for line in run[0].read_text().splitlines()]
    kind = "apply" if is_reading_lost else "plan"
    of_kind = [number for number, event in enumerate(events) if event["event"] == kind and event.get(kind, 1)]
    changed = of_kind[len(of_kind) // 2]
    if is_reading_lost:
        events[changed]["clock"] = []
    else:
        events[changed]["plan"]["rows"] = [99]
    events[0]["weft"] = "0.0.1"
    path = tmp_path / "changed.log"
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    with pytest.raises(ReplayDifference) as caught:
        replay(str(path))
    assert caught.value.exit_code == 1
    with replayed(run[0]) as whole, replayed(path) as frames:
        assert frames.problem == str(caught.value)
        assert f"{path}, line {changed + 1}: " in frames.problem
        assert frames.problem.endswith(f"Weft 0.0.1 wrote the log; this is weft {__version__}")
        assert 50 < frames.num_frames < whole.num_frames
        assert frames.read(0, frames.num_frames) == whole.read(0, frames.num_frames)


def test_without_room_for_more_frames_the_ones_before_are_shown(
    monkeypatch: pytest.MonkeyPatch, run: tuple[Path, list[dict[str, Any]]]
) -> None:
    write, calls = os.pwrite, []

    def write_twice(file: int, content: memoryview, offset: int) -> int:
        calls.append(offset)
        if len(calls) > 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(file, content, offset)

    monkeypatch.setattr(os, "pwrite", write_twice)
    with replayed(run[0]) as frames:
        assert frames.problem is not None and frames.problem.endswith(": No space left on device")
        assert len(all_of(frames)) == frames.num_frames == 3 * 32


def with_start(path: Path, **changes: Any) -> bytes:
    lines = path.read_text().splitlines(keepends=True)
    return "".join(
        [msgspec.json.encode({**json.loads(lines[0]), **changes}).decode() + "\n", *lines[1:]]
    ).encode()


FOREIGN: dict[str, tuple[Callable[[Path], bytes], str]] = {
    "empty": (lambda path: b"", "is empty: not a weft log"),
    "binary": (lambda path: random.Random(3).randbytes(3 << 20), "line 1: not a weft log"),
    "no lines": (lambda path: b"\0" * (3 << 20), "line 1: not a weft log"),
    "text": (lambda path: b"INFO: started\nINFO: ended\n", "line 1: not a weft log"),
    "other JSON lines": (lambda path: b'{"time": 1}\n{"time": 2}\n', "line 1: not a weft log"),
    "a JSON list": (lambda path: b"[1, 2]\n", "line 1: not a weft log"),
    "deep JSON": (lambda path: b"[" * 500_000 + b"\n", "line 1: not a weft log"),
    "the middle of a log": (
        lambda path: b"".join(path.read_bytes().splitlines(keepends=True)[5:]),
        "line 1: not a weft log",
    ),
    "cut in its first line": (lambda path: path.read_bytes()[:300], "or cut in its first line"),
    "an older version": (
        lambda path: with_start(path, version=LOG_VERSION - 1, weft="0.0.9"),
        f"version {LOG_VERSION - 1}, of weft 0.0.9; weft {__version__} replays version {LOG_VERSION}",
    ),
    "a start without its settings": (lambda path: with_start(path, config={}), "line 1: cannot be replayed"),
    "a setting that is invalid": (
        lambda path: with_start(path, config={**dataclasses.asdict(SchedulerConfig()), "max_running": -1}),
        "max_running",
    ),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_file_that_is_no_log_of_this_version_is_refused(
    tmp_path: Path, run: tuple[Path, list[dict[str, Any]]], name: str
) -> None:
    make, message = FOREIGN[name]
    path = tmp_path / "foreign.log"
    path.write_bytes(make(run[0]))
    for refuse in (replay, ReplayFrames):
        with pytest.raises(UnreadableLogError) as caught:
            refuse(str(path))
        assert str(path) in str(caught.value) and message in str(caught.value)
        assert caught.value.exit_code == 2
        assert len(str(caught.value)) < 500
