"""`python -m benchmarks scheduler`: host time of `schedule` and `apply`, by number of running and waiting requests.

The real scheduler runs on the real clock, without a backend. All running requests decode. Their positions are spread
evenly over their KV blocks: in every step one in `BLOCK_SIZE` needs a new block, and as many blocks are hashed. All rows
are taken, so that the scheduler considers the waiting requests in every step and admits none.
"""

from __future__ import annotations

import gc
import itertools
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

from weft.bench.report import Check, machine, print_checks, print_json, print_line, print_table, quantile
from weft.config import SchedulerConfig
from weft.plan import BackendInfo, StepResult
from weft.request import InferenceRequest, SamplingParams, numbered_ids
from weft.scheduling.scheduler import ContinuousBatchScheduler
from weft.scheduling.sequence import Sequence

TraceFunction = Callable[[FrameType, str, Any], Any]

BLOCK_SIZE = 16
RUNNING = (1, 32, 256, 1024)
WAITING = (10, 100_000)
WARM_UP_STEPS = 2 * BLOCK_SIZE
STEPS_PER_ROUND = 4 * BLOCK_SIZE
LIMIT_MS = 0.5
"""Limit of schedule and apply together, with 256 running requests, on one Zen 3 core."""
TOLERANCE = 1.5
"""How far a ratio of two times may exceed its expected value: other load adds noise, and four times the requests fit
the caches less well. Quadratic cost would give a ratio of 16 instead of 4."""


@dataclass(frozen=True)
class Cell:
    """Host time of steps with `running` and `waiting` requests, in milliseconds.

    Medians are of the fastest round, since other load on the machine only adds time; p99 is over all rounds.
    """

    running: int
    waiting: int
    steps: int
    schedule_median_ms: float
    schedule_p99_ms: float
    apply_median_ms: float
    apply_p99_ms: float
    step_median_ms: float
    step_p99_ms: float
    step_loudest_median_ms: float
    """Median of the slowest round: shows the effect of other load on the machine."""
    blocks_taken_per_step: float
    full_collections: int
    """Collections of the garbage collector's oldest generation during the timed steps."""
    instructions: int
    """Python bytecode instructions of one step: exact, and the same on every machine."""

    @property
    def microseconds_per_sequence(self) -> float:
        return 1000 * self.step_median_ms / self.running


def main(quick: bool = False, json: bool = False) -> None:
    cells = measure_all(quick)
    checks = check(cells)
    if json:
        print_json({"machine": machine(), "gc": _describe_gc(), "cells": cells, "checks": checks})
        return
    print_table(
        "Host time of a decode step, ms: median of the fastest round, p99 over all rounds",
        (
            *("running", "waiting", "schedule", "p99", "apply", "p99", "both", "p99", "slowest"),
            *("us/sequence", "bytecode", "blocks/step", "gc"),
        ),
        [_row(cell) for cell in cells],
    )
    print_checks(checks)
    print_line(f"{machine()}; one thread; {_describe_gc()}")
    print_line("slowest: the median of the slowest round; gc: full collections during the timed steps")


def measure_all(quick: bool = False) -> list[Cell]:
    """Measures every combination of running and waiting requests. `quick` runs fewer steps. It measures the larger number
    of waiting requests only with 256 running ones."""
    rounds = 2 if quick else 8
    cells = []
    for waiting, running in itertools.product(WAITING, RUNNING):
        if not quick or waiting == WAITING[0] or running == 256:
            cells.append(measure(running, waiting, rounds))
    return cells


def measure(running: int, waiting: int, rounds: int) -> Cell:
    steps = rounds * STEPS_PER_ROUND
    scheduler = decoding_scheduler(running, waiting, steps + WARM_UP_STEPS + 1)
    for _ in range(WARM_UP_STEPS):
        _timed_step(scheduler)
    collections = gc.get_stats()[2]["collections"]
    blocks = scheduler.kv_cache.stats().blocks_used
    times = [[_timed_step(scheduler) for _ in range(STEPS_PER_ROUND)] for _ in range(rounds)]
    blocks_taken = scheduler.kv_cache.stats().blocks_used - blocks
    assert len(scheduler.queue) == waiting and len(scheduler.running) == running, (
        "the running or waiting requests changed"
    )
    times.sort(key=lambda timed: statistics.median(map(sum, timed)))
    schedules, applies, both = _milliseconds(times[0])
    all_schedules, all_applies, all_both = _milliseconds(list(itertools.chain(*times)))
    return Cell(
        running=running,
        waiting=waiting,
        steps=steps,
        schedule_median_ms=statistics.median(schedules),
        schedule_p99_ms=quantile(all_schedules, 0.99),
        apply_median_ms=statistics.median(applies),
        apply_p99_ms=quantile(all_applies, 0.99),
        step_median_ms=statistics.median(both),
        step_p99_ms=quantile(all_both, 0.99),
        step_loudest_median_ms=statistics.median(_milliseconds(times[-1])[2]),
        blocks_taken_per_step=blocks_taken / steps,
        full_collections=gc.get_stats()[2]["collections"] - collections,
        instructions=count_instructions(scheduler),
    )


def _milliseconds(timed: list[tuple[float, float]]) -> tuple[list[float], list[float], list[float]]:
    """Times of schedule, of apply, and of both together."""
    return [1000 * s for s, _ in timed], [1000 * a for _, a in timed], [1000 * (s + a) for s, a in timed]


def decoding_scheduler(running: int, waiting: int, steps: int) -> ContinuousBatchScheduler:
    """A scheduler with `running` requests that all decode for at least `steps` steps, and `waiting` queued requests."""
    source = random.Random(running)
    longest_prompt = 512
    context = longest_prompt + steps + 2 * BLOCK_SIZE
    info = BackendInfo(
        vocabulary_size=50_000,
        max_context=context,
        num_blocks=(running + 1) * -(-context // BLOCK_SIZE),
        block_size=BLOCK_SIZE,
        swap_blocks=0,
        bytes_per_block=0,
    )
    config = SchedulerConfig(
        max_running=running,
        # Large enough for all prompts in one step: prefill is not measured.
        max_tokens_per_step=(running + 1) * longest_prompt,
        max_prefill_tokens=(running + 1) * longest_prompt,
        max_waiting_requests=running + waiting,
        max_waiting_tokens=(running + waiting) * longest_prompt,
    )
    scheduler = ContinuousBatchScheduler(config, info, time.perf_counter)
    new_id = numbered_ids()
    params = SamplingParams(max_tokens=context)
    for index in range(running):
        # The prompt lengths modulo the block size are evenly spread. So in each step the same number of sequences needs
        # a new block.
        length = source.randrange(64, longest_prompt - BLOCK_SIZE, BLOCK_SIZE) + index % BLOCK_SIZE
        prompt = tuple(source.choices(range(info.vocabulary_size), k=length))
        scheduler.add(Sequence(InferenceRequest(prompt, params, request_id=new_id()), seed=0))
    while any(s.target == s.prompt_length for s in scheduler.sequences.values()):
        _timed_step(scheduler)
    prompts = [tuple(source.choices(range(info.vocabulary_size), k=32)) for _ in range(256)]
    requests = itertools.cycle([InferenceRequest(prompt, params) for prompt in prompts])
    for request in itertools.islice(requests, waiting):
        scheduler.add(Sequence(request.replaced(request_id=new_id()), seed=0))
    return scheduler


def _timed_step(scheduler: ContinuousBatchScheduler) -> tuple[float, float]:
    """Runs one step as the engine does. Returns the seconds of `schedule` and of `apply`."""
    began = time.perf_counter()
    plan = scheduler.schedule()
    planned = time.perf_counter()
    assert plan is not None
    # New int objects, as from a device: Python caches the integers up to 256, which would make `apply` look faster.
    result = StepResult(tokens=list(range(10_000, 10_000 + sum(plan.samples))))
    ready = time.perf_counter()
    scheduler.apply(plan, result)
    over = time.perf_counter()
    scheduler.take_outputs()
    scheduler.tokens.token_gaps = {}
    return planned - began, over - ready


def count_instructions(scheduler: ContinuousBatchScheduler) -> int:
    """Bytecode instructions of the next step. Work inside C functions is not counted."""
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> TraceFunction:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        _timed_step(scheduler)
    finally:
        sys.settrace(before)
    return count


def check(cells: list[Cell]) -> list[Check]:
    at = {(cell.running, cell.waiting): cell for cell in cells}
    few, many = WAITING
    base, larger, queued = at[256, few], at[1024, few], at[256, many]
    checks = [
        Check(
            "host time of a step at 256 running",
            f"{base.step_median_ms:.3f} ms",
            f"at most {LIMIT_MS} ms on a Zen 3 core",
            base.step_median_ms <= LIMIT_MS,
        )
    ]
    for name, cell, bar in (
        ("no worse than linear in running: 1,024 against 256", larger, 4),
        ("flat in waiting: 100,000 against 10, at 256 running", queued, 1),
    ):
        code, seconds = cell.instructions / base.instructions, cell.step_median_ms / base.step_median_ms
        checks.append(
            Check(
                name,
                f"{code:.2f} times the bytecode, {seconds:.2f} times the time",
                f"{bar} times ({bar * TOLERANCE:g} for the time)",
                code <= bar and seconds <= bar * TOLERANCE,
            )
        )
    return checks


def _describe_gc() -> str:
    return f"garbage collector {'on' if gc.isenabled() else 'off'}, thresholds {gc.get_threshold()}"


def _row(cell: Cell) -> tuple[str, ...]:
    times = (
        *(cell.schedule_median_ms, cell.schedule_p99_ms, cell.apply_median_ms),
        *(cell.apply_p99_ms, cell.step_median_ms, cell.step_p99_ms, cell.step_loudest_median_ms),
    )
    return (
        f"{cell.running:,}",
        f"{cell.waiting:,}",
        *(f"{value:.3f}" for value in times),
        f"{cell.microseconds_per_sequence:.2f}",
        f"{cell.instructions:,}",
        f"{cell.blocks_taken_per_step:.2f}",
        f"{cell.full_collections}",
    )
