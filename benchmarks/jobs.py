"""Jobs of the batching benchmarks, and how they run through the real engine on any clock.

The workloads: many requests of mixed lengths at once, and 100 short requests with and without 10 long ones.
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
"""Two kinds of requests: (tokens of the prompt, tokens of the answer)."""
LOAD = 0.5
"""The fraction of the device time that the short and long requests take together, if 16 requests share a step."""


@dataclass(frozen=True)
class Job:
    """A request of a workload: arrival time, and the tokens of prompt and answer."""

    arrival: float
    prompt: int
    output: int


@dataclass
class Trace:
    """The token times of one job. Latencies count from its arrival, not from its submission to the engine."""

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
        """The longest time between two tokens of the answer."""
        return max((later - earlier for earlier, later in itertools.pairwise(self.token_times)), default=0.0)


@dataclass(frozen=True)
class Run:
    """Result of a workload: the traces of its jobs, its duration, and the use of its KV blocks."""

    traces: list[Trace]
    seconds: float
    held_positions: float
    unused_positions: float
    """Two sums over time, in positions times seconds: all token positions in KV blocks of running requests, and those
    without a token."""

    @property
    def output_tokens_per_second(self) -> float:
        return sum(trace.job.output for trace in self.traces) / self.seconds


def run_jobs(
    engine: ServingEngine, clock: Clock, wait_until: Callable[[float], None], jobs: Sequence[Job]
) -> Run:
    """Submits each job at its arrival time, on a clock that starts at 0, runs all, and stops the engine."""
    source, vocabulary = random.Random(0), range(min(40_000, engine.scheduler.info.vocabulary_size))
    traces: dict[RequestId, Trace] = {}

    def record_token(output: TokenOutput) -> None:
        traces[output.request_id].token_times.append(clock())

    pending = sorted(jobs, key=lambda job: job.arrival, reverse=True)
    held_seconds = unused_seconds = 0.0
    while True:
        while pending and pending[-1].arrival <= clock():
            job = pending.pop()
            # Prompts without common prefixes: prefix hits would make later requests cheaper than earlier ones.
            prompt = tuple(source.choices(vocabulary, k=job.prompt))
            params = SamplingParams(max_tokens=job.output, temperature=0.0, ignore_eos=True)
            traces[engine.submit_with_callback(InferenceRequest(prompt, params), record_token)] = Trace(job)
        began, (positions, empty_positions) = clock(), _count_positions(engine.scheduler)
        if engine.has_work:
            engine.run_iteration()
            held_seconds += positions * (clock() - began)
            unused_seconds += empty_positions * (clock() - began)
        elif pending:
            wait_until(pending[-1].arrival)
        else:
            break
    engine.stop()
    for trace in traces.values():
        assert len(trace.token_times) == trace.job.output, "a job did not get all its tokens"
    return Run(list(traces.values()), clock(), held_seconds, unused_seconds)


def _count_positions(scheduler: ContinuousBatchScheduler) -> tuple[int, int]:
    """Token positions in the KV blocks of running requests, and how many of them no scheduled token uses."""
    blocks = sum(len(sequence.allocation.blocks) for sequence in scheduler.running if sequence.allocation)
    positions = blocks * scheduler.info.block_size
    return positions, positions - sum(sequence.scheduled for sequence in scheduler.running)


def _uniform(source: random.Random, low: int, high: int) -> int:
    return source.randint(low, high)


def _skewed(source: random.Random, low: int, high: int) -> int:
    """Draws a length from a log-uniform distribution: many short lengths, few long ones, as in real traffic."""
    return round(math.exp(source.uniform(math.log(low), math.log(high))))


_LENGTHS: dict[str, Callable[[random.Random, int, int], int]] = {"even": _uniform, "skewed": _skewed}


def mixed_jobs(lengths: str, count: int = 64) -> list[Job]:
    """Requests at time 0 with prompts of 16 to 512 and answers of 16 to 256 tokens; `lengths` is "even" or "skewed"."""
    source, draw = random.Random(64), _LENGTHS[lengths]
    return [Job(0.0, draw(source, 16, 512), draw(source, 16, 256)) for _ in range(count)]


# ---------------------------------------------------------------------- long and short requests


@dataclass(frozen=True)
class Mix:
    """100 short requests, alone and together with 10 long ones, over several seeds. Times are in seconds."""

    device: str
    policy: str
    requests_per_second: float
    short_p99_alone: float
    short_p99: float
    first_token_p99_alone: float
    first_token_p99: float
    largest_gap: float
    """The longest time between two tokens of a short request."""
    largest_extra_wait: float
    """Largest increase of the time to first token of a short request, caused by the long ones."""
    fragmentation: float
    fragmentation_alone: float
    long_p50: float

    @property
    def rise(self) -> float:
        return self.short_p99 / self.short_p99_alone - 1

    @property
    def longest_stall(self) -> float:
        return max(self.largest_gap, self.largest_extra_wait)


def mix_of(device: str, policy: str, rate: float, alone: Sequence[Run], mixed: Sequence[Run]) -> Mix:
    """Compares runs of the short requests alone with runs that include the long ones. Both lists are in the same order
    of seeds."""
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
    return sum(result.unused_positions for result in runs) / sum(result.held_positions for result in runs)


def check_mixes(mixes: Sequence[Mix]) -> list[Check]:
    checks = []
    for mix in mixes:
        name = f"{mix.device}, {mix.policy}"
        checks += [
            Check(
                f"{name}: rise of the p99 of short requests",
                f"{mix.rise:.0%}",
                "less than 50%",
                mix.rise < 0.5,
            ),
            Check(
                f"{name}: longest stall of a short request by a prefill",
                f"{1000 * mix.longest_stall:.0f} ms",
                "at most 500 ms",
                mix.longest_stall <= 0.5,
            ),
            Check(
                f"{name}: KV fragmentation, with and without long requests",
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
        f"100 short requests (32/64), without -> with 10 long ones (2048/512), Poisson arrivals at {LOAD:.0%} load, ms",
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
