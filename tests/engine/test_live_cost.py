"""A viewer of the live page costs the loop of the engine under 1% of its instructions. Other threads make the frames."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from weft.backends.noop import NoopBackend
from weft.config import KvCachePoolConfig, SchedulerConfig, ServingEngineConfig
from weft.engine.serving import ServingEngine
from weft.live import LiveFrame
from weft.request import InferenceRequest, RequestId, SamplingParams

ALLOWED = 0.01
STEPS_PER_FRAME = 16


def instructions(work: Callable[[], object]) -> int:
    """Bytecode instructions of this thread."""
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def counted(max_tokens: int, number: int, *, is_watched: bool, running: int = 64) -> tuple[int, int, int]:
    """Runs `number` requests to their end. Returns the instructions of the loop, its steps, and the steps and events in
    frames."""
    config = ServingEngineConfig(
        SchedulerConfig(max_running=running, max_chunk_tokens=32), KvCachePoolConfig(2000, 16)
    )
    engine = ServingEngine(NoopBackend(), config, clock=lambda: 0.0, seed=1)
    frames: list[LiveFrame] = []

    def watch() -> None:
        if is_watched:
            thread = threading.Thread(target=lambda: frames.append(engine.live_frame()))
            thread.start()
            thread.join()

    watch()
    for one in range(number):
        prompt = tuple(range(one, one + 80))
        request = InferenceRequest(prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True))
        engine.submit_with_callback(request.replaced(request_id=RequestId(f"r{one}")), lambda output: None)
    count = 0
    while engine.has_work:
        count += instructions(lambda: [engine.run_iteration() for _ in range(STEPS_PER_FRAME)])
        watch()
    engine.stop()
    seen = sum(len(frame.steps) + len(frame.events) for frame in frames)
    assert all(frame.steps_left_out == frame.events_left_out == 0 for frame in frames)
    return count, engine.scheduler.stats.steps, seen


@pytest.mark.parametrize(
    ("max_tokens", "number"), [(400, 1), (200, 8), (50, 64), (4, 200)], ids=["1", "8", "64", "short answers"]
)
def test_a_viewer_adds_under_one_percent_to_the_instructions_of_the_loop(
    max_tokens: int, number: int
) -> None:
    without, steps, seen = counted(max_tokens, number, is_watched=False)
    assert seen == 0
    watched, same_steps, seen = counted(max_tokens, number, is_watched=True)
    assert same_steps == steps and seen >= steps + 3 * number, "the frames have every step and event"
    print(
        f"{number} requests: {without / steps:.0f} instructions a step, {(watched - without) / steps:.1f} more"
    )
    assert 0 < watched - without < ALLOWED * without
