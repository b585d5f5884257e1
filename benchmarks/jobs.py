"""Jobs for the benches of batching, run through the real engine on any clock: what they are, and what became of each.

Three workloads: many requests of mixed lengths at once, and 100 short requests with and without 10 long ones among them.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from weft.bench.report import Check, print_table, quantile
from weft.clock import Clock
from weft.engine.serving import ServingEngine
from weft.request import InferenceRequest, RequestId, SamplingParams, TokenOutput
from weft.scheduling.scheduler import ContinuousBatchScheduler

SHORT, LONG = (32, 64), (2048, 512)
"""Prompt and answer."""
LOAD = 0.5
"""Share of the device's time that short and long requests together take, where 16 share a step."""


@dataclass(frozen=True)
class Job:
    """A request as a workload names it: when it comes, and how long its prompt and its answer are."""

    arrival: float
    prompt: int
    output: int


@dataclass
class Trace:
    """One job's way through the engine. Times count from its arrival, not from when the engine saw it."""

    job: Job
    token_times: list[float] = field(default_factory=list)

    @property
    def first_token(self) -> float:
        return self.token_times[0] - self.job.arrival

    @property
    def latency(self) -> float:
        return self.token_times[-1] - self.job.arrival

    @property
    def largest_gap(self) -> float:
        """The longest silence between two tokens of the answer."""
        return max((later - earlier for earlier, later in itertools.pairwise(self.token_times)), default=0.0)


@dataclass(frozen=True)
class Run:
    """What a workload gave: its jobs' traces, when it ended, and how full its blocks were."""

    traces: list[Trace]
    seconds: float
    held_cells: float
    unused_cells: float
    """Cells in blocks held by running requests, and those of them without a token; both times seconds."""

    @property
    def output_tokens_per_second(self) -> float:
        return sum(trace.job.output for trace in self.traces) / self.seconds


def run_jobs(
    engine: ServingEngine, clock: Clock, wait_until: Callable[[float], None], jobs: Sequence[Job]
) -> Run:
    """Runs the jobs, each submitted at its time on a clock that starts at 0, and stops the engine."""
    source, vocabulary = random.Random(0), range(min(40_000, engine.scheduler.info.vocabulary_size))
    traces: dict[RequestId, Trace] = {}

    def note(output: TokenOutput) -> None:
        traces[output.request_id].token_times.append(clock())

    pending = sorted(jobs, key=lambda job: job.arrival, reverse=True)
    held = unused = 0.0
    while True:
        while pending and pending[-1].arrival <= clock():
            job = pending.pop()
            # Prompts that share no prefix: hits in the cache would make later requests cheaper than earlier ones.
            prompt = tuple(source.choices(vocabulary, k=job.prompt))
            params = SamplingParams(max_tokens=job.output, temperature=0.0, ignore_eos=True)
            traces[engine.submit_with_callback(InferenceRequest(prompt, params), note)] = Trace(job)
        began, (cells, empty) = clock(), _cells(engine.scheduler)
        if engine.has_work:
            engine.run_iteration()
            held += cells * (clock() - began)
            unused += empty * (clock() - began)
        elif pending:
            wait_until(pending[-1].arrival)
        else:
            break
    engine.stop()
    for trace in traces.values():
        assert len(trace.token_times) == trace.job.output, "a job did not get all its tokens"
    return Run(list(traces.values()), clock(), held, unused)


def _cells(scheduler: ContinuousBatchScheduler) -> tuple[int, int]:
    """Cells in the blocks of running requests, and how many of them hold no token and are not being written."""
    blocks = sum(len(sequence.allocation.blocks) for sequence in scheduler.running if sequence.allocation)
    cells = blocks * scheduler.info.block_size
    return cells, cells - sum(sequence.scheduled for sequence in scheduler.running)


def _even(source: random.Random, low: int, high: int) -> int:
    return source.randint(low, high)


def _skewed(source: random.Random, low: int, high: int) -> int:
    """Evenly spread logarithms: many short, few long, as people ask."""
    return round(math.exp(source.uniform(math.log(low), math.log(high))))


_LENGTHS: dict[str, Callable[[random.Random, int, int], int]] = {"even": _even, "skewed": _skewed}


def mixed_jobs(lengths: str, count: int = 64) -> list[Job]:
    """Requests at once: prompts of 16 to 512 tokens, answers of 16 to 256; "even" or "skewed"."""
    source, draw = random.Random(64), _LENGTHS[lengths]
    return [Job(0.0, draw(source, 16, 512), draw(source, 16, 256)) for _ in range(count)]


# ---------------------------------------------------------------------- long among short


@dataclass(frozen=True)
class Mix:
    """100 short requests, without and with 10 long ones among them; over several seeds. Seconds."""

    device: str
    policy: str
    requests_per_second: float
    short_p99_alone: float
    short_p99: float
    first_token_p99_alone: float
    first_token_p99: float
    largest_gap: float
    """Between two tokens of a short request."""
    largest_extra_wait: float
    """For the first token of a short request, above what the same request waited without the long ones."""
    fragmentation: float
    fragmentation_alone: float
    long_p50: float

    @property
    def rise(self) -> float:
        return self.short_p99 / self.short_p99_alone - 1

    @property
    def longest_block(self) -> float:
        return max(self.largest_gap, self.largest_extra_wait)


def mix_of(device: str, policy: str, rate: float, alone: Sequence[Run], mixed: Sequence[Run]) -> Mix:
    """From runs of the short requests alone and of the same with the long ones, in the same order."""
    before = [trace for result in alone for trace in result.traces]
    after = [trace for result in mixed for trace in result.traces if trace.job.prompt == SHORT[0]]
    long = [trace for result in mixed for trace in result.traces if trace.job.prompt == LONG[0]]
    return Mix(
        device=device,
        policy=policy,
        requests_per_second=rate,
        short_p99_alone=quantile([trace.latency for trace in before], 0.99),
        short_p99=quantile([trace.latency for trace in after], 0.99),
        first_token_p99_alone=quantile([trace.first_token for trace in before], 0.99),
        first_token_p99=quantile([trace.first_token for trace in after], 0.99),
        largest_gap=max(trace.largest_gap for trace in after),
        largest_extra_wait=max(b.first_token - a.first_token for a, b in zip(before, after, strict=True)),
        fragmentation=_fragmentation(mixed),
        fragmentation_alone=_fragmentation(alone),
        long_p50=quantile([trace.latency for trace in long], 0.5),
    )


def poisson_jobs(source: random.Random, rate: float) -> list[Job]:
    lengths = [SHORT] * 100 + [LONG] * 10
    source.shuffle(lengths)
    arrivals = itertools.accumulate(source.expovariate(rate) for _ in lengths)
    return [Job(arrival, *length) for arrival, length in zip(arrivals, lengths, strict=True)]


def _fragmentation(runs: Sequence[Run]) -> float:
    return sum(result.unused_cells for result in runs) / sum(result.held_cells for result in runs)


def check_mixes(mixes: Sequence[Mix]) -> list[Check]:
    checks = []
    for mix in mixes:
        who = f"{mix.device}, {mix.policy}"
        checks += [
            Check(f"{who}: p99 of the short rises", f"{mix.rise:.0%}", "less than 50%", mix.rise < 0.5),
            Check(
                f"{who}: longest block of a short one by a prefill",
                f"{1000 * mix.longest_block:.0f} ms",
                "at most 500 ms",
                mix.longest_block <= 0.5,
            ),
            Check(
                f"{who}: KV fragmentation, with and without the long ones",
                f"{mix.fragmentation:.1%}, {mix.fragmentation_alone:.1%}",
                "less than 15%",
                max(mix.fragmentation, mix.fragmentation_alone) < 0.15,
            ),
        ]
    return checks


def print_mixes(mixes: Sequence[Mix]) -> None:
    def ms(*seconds: float) -> str:
        return " -> ".join(f"{1000 * value:,.0f}" for value in seconds)

    print_table(
        f"10 long (2048/512) among 100 short (32/64), Poisson arrivals at {LOAD:.0%} load; without -> with them, ms",
        (
            *("device, policy", "requests/s", "p99", "first token p99"),
            *("gap", "extra wait", "KV unused", "long p50"),
        ),
        [
            (
                f"{m.device}, {m.policy}",
                f"{m.requests_per_second:.2f}",
                ms(m.short_p99_alone, m.short_p99),
                ms(m.first_token_p99_alone, m.first_token_p99),
                ms(m.largest_gap),
                ms(m.largest_extra_wait),
                f"{m.fragmentation_alone:.1%} -> {m.fragmentation:.1%}",
                ms(m.long_p50),
            )
            for m in mixes
        ],
    )
