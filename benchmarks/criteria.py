"""`python -m benchmarks criteria`: the published criteria of batching, measured on a real model with the CPU backend, in one run.

What `python -m benchmarks batching` computes from a cost model is measured here: continuous against static batching, scaling to 16,
and long requests among short ones. Each run has an engine of its own, so that no cache helps the next one.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.jobs import (
    LOAD,
    LONG,
    SHORT,
    Job,
    Mix,
    Run,
    check_mixes,
    mix_of,
    mixed_jobs,
    poisson_jobs,
    print_mixes,
    run_jobs,
)
from weft.backends import registry
from weft.backends.cpu.kernels import describe
from weft.bench.report import Check, machine, print_checks, print_json, print_line, print_table
from weft.config import KvCachePoolConfig, PriorityPolicy, SchedulerConfig, ServingEngineConfig
from weft.engine.serving import ServingEngine
from weft.loading.checkpoint import Checkpoint, open_checkpoint
from weft.loading.pull import pull

ROWS = 16
BATCHES = (1, 2, 4, 8, 16)
_LONGEST = 512, 256
"""Prompt and answer among the mixed lengths."""

RunJobs = Callable[[SchedulerConfig, Sequence[Job], int | None], Run]
"""Runs jobs on a fresh engine with this scheduler, and this many blocks or the default."""


@dataclass(frozen=True)
class Comparison:
    """64 requests at once, continuously and in batches that are formed, closed and run to their end; tokens/s."""

    equal: str
    """What both have the same amount of: rows, or memory for that many whole sequences."""
    continuous: float
    static: float

    @property
    def ratio(self) -> float:
        return self.continuous / self.static


@dataclass(frozen=True)
class Scaling:
    """So many equal requests at once (128 in, 128 out); tokens/s."""

    batch: int
    tokens_per_second: float
    efficiency: float
    """Against as many times the speed of one request alone."""


@dataclass(frozen=True)
class Report:
    comparisons: list[Comparison]
    scalings: list[Scaling]
    mix: Mix

    @property
    def checks(self) -> list[Check]:
        compared = [
            Check(
                f"continuous against static batching, the same {one.equal}",
                f"{one.ratio:.2f} times",
                "more than 2 times",
                one.ratio > 2,
            )
            for one in self.comparisons
        ]
        last = self.scalings[-1]
        name = f"scaling efficiency to batch {last.batch}"
        scaled = Check(name, f"{last.efficiency:.1%}", "more than 70%", last.efficiency > 0.7)
        return [*compared, scaled, *check_mixes([self.mix])]


def main(model: str, *, threads: int | None, json: bool) -> None:
    checkpoint = open_checkpoint(pull(model))
    run, kernels = engine_runs(checkpoint, threads), describe(threads)
    if json:
        report = measure(run)
        where = {"machine": machine(), "kernels": kernels}
        print_json({**vars(report), "checks": report.checks, **where})
        return
    print_line(f"{machine()}; {checkpoint.path.name}, {checkpoint.stored_as}; kernels: {kernels}")
    print_line("Three parts, minutes in all: each is told when it is measured.")
    print_checks(measure(run, _print_comparisons, _print_scalings, lambda mix: print_mixes([mix])).checks)


def _print_comparisons(comparisons: Sequence[Comparison]) -> None:
    print_table(
        "Continuous against static batching: 64 requests, prompts 16-512, answers 16-256; output tokens/s",
        ("the same", "continuous", "static", "ratio"),
        [
            (one.equal, f"{one.continuous:,.0f}", f"{one.static:,.0f}", f"{one.ratio:.2f}")
            for one in comparisons
        ],
    )


def _print_scalings(scalings: Sequence[Scaling]) -> None:
    print_table(
        "Scaling: equal requests at once, 128 in and 128 out",
        ("batch", "tokens/s", "efficiency"),
        [(f"{one.batch}", f"{one.tokens_per_second:,.0f}", f"{one.efficiency:.1%}") for one in scalings],
    )


def engine_runs(checkpoint: Checkpoint, threads: int | None) -> RunJobs:
    def run(config: SchedulerConfig, jobs: Sequence[Job], num_blocks: int | None) -> Run:
        backend = registry.build("cpu", checkpoint=checkpoint, threads=threads)
        began = time.perf_counter()

        def clock() -> float:
            return time.perf_counter() - began

        pool = KvCachePoolConfig(num_blocks=num_blocks)
        engine = ServingEngine(
            backend, ServingEngineConfig(scheduler=config, cache=pool), clock=clock, seed=0
        )
        began = time.perf_counter()
        return run_jobs(engine, clock, lambda moment: time.sleep(max(0.0, moment - clock())), jobs)

    return run


def measure(
    run: RunJobs,
    compared: Callable[[list[Comparison]], object] = lambda _: None,
    scaled: Callable[[list[Scaling]], object] = lambda _: None,
    mixed: Callable[[Mix], object] = lambda _: None,
) -> Report:
    """All of it; each part is told to its listener as soon as it is known."""
    run(_continuous(), [Job(0.0, 64, 16)], None)  # pages of the weights, threads, caches
    comparisons = _compare(run)
    compared(comparisons)
    scalings = _scale(run)
    scaled(scalings)
    mix = _mix(run)
    mixed(mix)
    return Report(comparisons, scalings, mix)


def _continuous(rows: int | None = None) -> SchedulerConfig:
    """As `weft serve` and `LLM` have it."""
    if rows is None:
        return SchedulerConfig(policy=PriorityPolicy.ADAPTIVE)
    return SchedulerConfig(policy=PriorityPolicy.ADAPTIVE, max_running=rows)


def _compare(run: RunJobs) -> list[Comparison]:
    jobs = mixed_jobs("even")
    # A budget that lets a whole batch in at once: with less, a batch would close half empty and static look worse.
    room = ROWS * _LONGEST[0]
    static_config = SchedulerConfig(
        dynamic_batching=False,
        max_running=ROWS,
        max_tokens_per_step=room + ROWS,
        max_prefill_tokens=room,
    )
    static = run(static_config, jobs, None).output_tokens_per_second
    # A static batch has to keep room for the longest sequence in every row; the paged pool shares what is not used.
    blocks = ROWS * sum(_LONGEST) // KvCachePoolConfig().block_size
    return [
        Comparison(f"{ROWS} rows", run(_continuous(ROWS), jobs, None).output_tokens_per_second, static),
        Comparison(f"{blocks} blocks", run(_continuous(), jobs, blocks).output_tokens_per_second, static),
    ]


def _scale(run: RunJobs) -> list[Scaling]:
    speeds = [
        run(_continuous(), [Job(0.0, 128, 128)] * batch, None).output_tokens_per_second for batch in BATCHES
    ]
    return [
        Scaling(batch, speed, speed / (batch * speeds[0]))
        for batch, speed in zip(BATCHES, speeds, strict=True)
    ]


def _mix(run: RunJobs) -> Mix:
    """At half of what the machine can do with this mix, which a part of it, all at once, tells."""
    sample = [Job(0.0, *SHORT)] * 20 + [Job(0.0, *LONG)] * 2
    rate = LOAD * len(sample) / run(_continuous(), sample, None).seconds
    jobs = poisson_jobs(random.Random(0), rate)
    alone = run(_continuous(), [job for job in jobs if job.prompt == SHORT[0]], None)
    mixed = run(_continuous(), jobs, None)
    return mix_of("CPU", PriorityPolicy.ADAPTIVE.value, rate, [alone], [mixed])
