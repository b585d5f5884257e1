"""`python -m benchmarks criteria`: the published criteria of batching, measured on a real model with the CPU backend.

`python -m benchmarks batching` computes the same from a cost model: continuous against static batching, scaling to 16,
and long requests among short ones. Each run has a new engine, so that it gets no prefix hits from the last one.
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
"""The longest prompt and answer of the mixed lengths."""

RunJobs = Callable[[SchedulerConfig, Sequence[Job], int | None], Run]
"""Runs jobs on a new engine with this scheduler configuration and this many KV blocks (None: the default)."""


@dataclass(frozen=True)
class Comparison:
    """64 requests at once, with continuous and with static batching; tokens/s."""

    equal: str
    """The resource of which both kinds of batching have the same amount: rows, or KV blocks."""
    continuous: float
    static: float

    @property
    def ratio(self) -> float:
        return self.continuous / self.static


@dataclass(frozen=True)
class Scaling:
    """`batch` equal requests at once (128 prompt tokens, 128 output tokens)."""

    batch: int
    tokens_per_second: float
    efficiency: float
    """The speed, relative to `batch` times the speed of one request alone."""


@dataclass(frozen=True)
class Report:
    comparisons: list[Comparison]
    scalings: list[Scaling]
    mix: Mix

    @property
    def checks(self) -> list[Check]:
        comparisons = [
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
        scaling = Check(name, f"{last.efficiency:.1%}", "more than 70%", last.efficiency > 0.7)
        return [*comparisons, scaling, *check_mixes([self.mix])]


def main(model: str, *, threads: int | None, json: bool) -> None:
    checkpoint = open_checkpoint(pull(model))
    run, kernels = engine_runs(checkpoint, threads), describe(threads)
    if json:
        report = measure(run)
        where = {"machine": machine(), "kernels": kernels}
        print_json({**vars(report), "checks": report.checks, **where})
        return
    print_line(f"{machine()}; {checkpoint.path.name}, {checkpoint.stored_as}; kernels: {kernels}")
    print_line("Three parts, some minutes in all. Each is printed when it is measured.")
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
        began = time.perf_counter()  # again, so that the time to open the engine does not count
        return run_jobs(engine, clock, lambda moment: time.sleep(max(0.0, moment - clock())), jobs)

    return run


def measure(
    run: RunJobs,
    on_comparisons: Callable[[list[Comparison]], object] = lambda _: None,
    on_scalings: Callable[[list[Scaling]], object] = lambda _: None,
    on_mix: Callable[[Mix], object] = lambda _: None,
) -> Report:
    """Measures the comparisons, the scaling and the mix. Each result is passed to its callback as soon as it is known."""
    run(_continuous(), [Job(0.0, 64, 16)], None)  # warm-up: page in the weights, start threads, fill caches
    comparisons = _compare(run)
    on_comparisons(comparisons)
    scalings = _scale(run)
    on_scalings(scalings)
    mix = _mix(run)
    on_mix(mix)
    return Report(comparisons, scalings, mix)


def _continuous(rows: int | None = None) -> SchedulerConfig:
    """The configuration of `weft serve` and `LLM`."""
    if rows is None:
        return SchedulerConfig(policy=PriorityPolicy.ADAPTIVE)
    return SchedulerConfig(policy=PriorityPolicy.ADAPTIVE, max_running=rows)


def _compare(run: RunJobs) -> list[Comparison]:
    jobs = mixed_jobs("even")
    # The token budget allows a whole batch in one step: with less, a static batch would start half empty and look
    # worse.
    prompt_tokens = ROWS * _LONGEST[0]
    static_config = SchedulerConfig(
        dynamic_batching=False,
        max_running=ROWS,
        max_tokens_per_step=prompt_tokens + ROWS,
        max_prefill_tokens=prompt_tokens,
    )
    static = run(static_config, jobs, None).output_tokens_per_second
    # A static batch reserves KV blocks for the longest sequence in every row. With paging, other sequences use the
    # blocks that a short one leaves.
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
    """Sends the mix of long and short requests at half of the rate that the machine can sustain. To find that rate, a
    sample of the mix is sent all at once."""
    sample = [Job(0.0, *SHORT)] * 20 + [Job(0.0, *LONG)] * 2
    rate = LOAD * len(sample) / run(_continuous(), sample, None).seconds
    jobs = poisson_jobs(random.Random(0), rate)
    alone = run(_continuous(), [job for job in jobs if job.prompt == SHORT[0]], None)
    mixed = run(_continuous(), jobs, None)
    return mix_of("CPU", PriorityPolicy.ADAPTIVE.value, rate, [alone], [mixed])
