"""A viewer of the live page costs the loop of the engine under 1% of its instructions. Other threads make the frames."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

import pytest

from weft.backends.noop import NoopBackend
from weft.config import KvCachePoolConfig, SchedulerConfig, ServingEngineConfig
from weft.engine.serving import ServingEngine
from weft.live import LiveFrame
from weft.metrics import SchedulerStats
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


@dataclass(frozen=True)
class Case:
    max_tokens: int
    number: int
    """Requests, all submitted at once."""
    running: int = 64
    blocks: int = 2000
    swap_blocks: int = 0


CASES = {
    "1": Case(400, 1),
    "8": Case(200, 8),
    "64": Case(50, 64),
    "256 rows": Case(12, 256, running=256),
    "short answers": Case(4, 200),
    "preemptions": Case(120, 16, running=16, blocks=130),
    "swaps": Case(120, 16, running=16, blocks=130, swap_blocks=400),
}


def counted(case: Case, *, is_watched: bool) -> tuple[int, SchedulerStats, int]:
    """Runs the requests of a case to their end. Returns the instructions of the loop, the totals of the scheduler, and the
    steps and events in frames."""
    config = ServingEngineConfig(
        SchedulerConfig(max_running=case.running, max_chunk_tokens=32),
        KvCachePoolConfig(case.blocks, 16, swap_blocks=case.swap_blocks),
    )
    engine = ServingEngine(NoopBackend(), config, clock=lambda: 0.0, seed=1)
    frames: list[LiveFrame] = []

    def watch() -> None:
        if is_watched:
            thread = threading.Thread(target=lambda: frames.append(engine.live_frame()))
            thread.start()
            thread.join()

    watch()
    for one in range(case.number):
        prompt = tuple(range(one, one + 80))
        request = InferenceRequest(prompt, SamplingParams(max_tokens=case.max_tokens, ignore_eos=True))
        engine.submit_with_callback(request.replaced(request_id=RequestId(f"r{one}")), lambda output: None)
    watch()
    count = 0
    while engine.has_work:
        count += instructions(lambda: [engine.run_iteration() for _ in range(STEPS_PER_FRAME)])
        watch()
    engine.stop()
    seen = sum(len(frame.steps) + len(frame.events) for frame in frames)
    assert all(frame.steps_left_out == frame.events_left_out == 0 for frame in frames)
    return count, engine.scheduler.stats, seen


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_viewer_adds_under_one_percent_to_the_instructions_of_the_loop(case: Case) -> None:
    without, stats, seen = counted(case, is_watched=False)
    assert seen == 0
    watched, same_stats, seen = counted(case, is_watched=True)
    assert same_stats == stats and seen >= stats.steps + 3 * case.number, (
        "the frames have every step and event"
    )
    assert (stats.preemptions_by_recompute > 0) == (case is CASES["preemptions"])
    assert (stats.preemptions_by_swap > 0) == (case is CASES["swaps"])
    print(
        f"{case.number} requests: {without / stats.steps:.0f} instructions a step, "
        f"{(watched - without) / stats.steps:.1f} more"
    )
    assert 0 < watched - without < ALLOWED * without
