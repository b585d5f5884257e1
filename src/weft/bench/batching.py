"""What the plans are worth: the real engine over a cost model on a virtual clock, so that every figure is exact.

Three questions: what continuous batching brings over static batching, how throughput grows with the batch, and what
long requests do to the short ones beside them. Each is asked of two devices: a small CPU, bound by arithmetic, where a
larger batch hardly makes a token cheaper, and an accelerator, bound by reading its weights, where it is nearly free.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from weft.backends.cost_model import H200_LLAMA_8B, ZEN3_SMOLLM2_135M, CostModelBackend, StepCosts
from weft.bench.report import Check, print_checks, print_json, print_line, print_table, quantile
from weft.clock import VirtualClock
from weft.config import KvCachePoolConfig, PriorityPolicy, SchedulerConfig, ServingEngineConfig
from weft.engine.serving import ServingEngine
from weft.request import InferenceRequest, RequestId, SamplingParams, TokenOutput
from weft.scheduling.scheduler import ContinuousBatchScheduler

DEVICES = {"CPU": ZEN3_SMOLLM2_135M, "H200": H200_LLAMA_8B}
TARGETS = {"CPU": 0.1, "H200": 0.006}
"""Seconds between tokens asked of the policy ADAPTIVE. On the H200 half as much again as a decode step takes."""
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


@dataclass(frozen=True)
class Report:
    static: list[Comparison]
    scaling: list[Scaling]
    long_and_short: list[Mix]

    @property
    def checks(self) -> list[Check]:
        return [
            *_check_comparisons(self.static),
            *_check_scaling(self.scaling),
            *_check_mixes(self.long_and_short),
        ]


def main(json: bool = False, quick: bool = False) -> None:
    report = measure_all(quick)
    if json:
        print_json({**vars(report), "checks": report.checks})
        return
    _print_comparisons(report.static)
    _print_scaling(report.scaling)
    _print_mixes(report.long_and_short)
    print_checks(report.checks)
    print_line("Virtual time: the figures follow from the cost model and are the same on every machine.")


def measure_all(quick: bool = False) -> Report:
    """Everything; `quick` takes the mix of long and short from one seed, not three."""
    policies = (PriorityPolicy.FCFS, PriorityPolicy.ADAPTIVE)
    num_seeds = 1 if quick else 3
    mixes = [measure_mix(*which, num_seeds) for which in itertools.product(DEVICES, policies)]
    return Report(compare_with_static(), measure_scaling(), mixes)


def run(costs: StepCosts, config: SchedulerConfig, jobs: Sequence[Job], num_blocks: int | None = None) -> Run:
    """Runs the jobs, each submitted at its time, through an engine with its defaults but for the scheduler's."""
    clock = VirtualClock()
    engine_config = ServingEngineConfig(scheduler=config, cache=KvCachePoolConfig(num_blocks=num_blocks))
    engine = ServingEngine(CostModelBackend(clock, costs), engine_config, clock=clock, seed=0)
    source = random.Random(0)
    traces: dict[RequestId, Trace] = {}

    def note(output: TokenOutput) -> None:
        traces[output.request_id].token_times.append(clock())

    pending = sorted(jobs, key=lambda job: job.arrival, reverse=True)
    held = unused = 0.0
    while True:
        while pending and pending[-1].arrival <= clock():
            job = pending.pop()
            # Prompts that share no prefix: hits in the cache would make later requests cheaper than earlier ones.
            prompt = tuple(source.choices(range(40_000), k=job.prompt))
            request = InferenceRequest(prompt, SamplingParams(max_tokens=job.output, temperature=0.0))
            traces[engine.submit_with_callback(request, note)] = Trace(job)
        began, (cells, empty) = clock(), _cells(engine.scheduler)
        if engine.run_iteration():
            held += cells * (clock() - began)
            unused += empty * (clock() - began)
        elif pending:
            clock.advance_to(pending[-1].arrival)
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


def work_seconds(costs: StepCosts, prompt: int, output: int) -> float:
    """What a request costs beside the base of the steps it is in: its prompt in one piece, then its decodes."""
    decodes = output - 1
    decoded_context = decodes * prompt + decodes * (decodes + 1) // 2
    return (
        costs.per_token * (prompt + decodes)
        + costs.per_context * (prompt + decoded_context)
        + costs.per_pair * (prompt * (prompt + 1) // 2 + decoded_context)
    )


def floor_seconds(costs: StepCosts, jobs: Sequence[Job], rows: int) -> float:
    """Less than this no scheduler can take: every step full, no prompt split, no request alone at the end."""
    steps = max(max(job.output for job in jobs), math.ceil(sum(job.output for job in jobs) / rows))
    return costs.base * steps + sum(work_seconds(costs, job.prompt, job.output) for job in jobs)


# ---------------------------------------------------------------------- continuous against static


@dataclass(frozen=True)
class Comparison:
    """One workload, run continuously and in batches that are formed, closed and run to their end."""

    device: str
    lengths: str
    equal: str
    """What both have the same amount of: rows, or memory for that many whole sequences."""
    continuous: float
    """Output tokens per second, as the two below."""
    static: float
    padded: float
    """Static, and every batch padded to its longest prompt and answer, as a plain `generate` over tensors is."""
    most_possible: float
    """`continuous` of a scheduler that never leaves a row empty and pays for nothing twice."""

    @property
    def ratio(self) -> float:
        return self.continuous / self.static


def compare_with_static(rows: int = 16) -> list[Comparison]:
    """64 requests at once: prompts of 16 to 512 tokens, answers of 16 to 256."""
    return [
        _compare(device, lengths, equal, rows)
        for device in DEVICES
        for lengths, equal in (("even", "rows"), ("skewed", "rows"), ("even", "memory"), ("skewed", "memory"))
    ]


def _compare(device: str, lengths: str, equal: str, rows: int) -> Comparison:
    costs, jobs = DEVICES[device], _mixed_jobs(_LENGTHS[lengths])
    # A budget that lets a whole batch in at once: with less, a batch would close half empty and static look worse.
    room = rows * 512
    static_config = SchedulerConfig(
        dynamic_batching=False,
        max_running=rows,
        max_tokens_per_step=room + rows,
        max_prefill_tokens=room,
    )
    # A static batch has to keep room for the longest sequence in every row; the paged pool shares what is not used.
    blocks = rows * (512 + 256) // KvCachePoolConfig().block_size if equal == "memory" else None
    config = SchedulerConfig(max_running=rows if blocks is None else 256)
    tokens = sum(job.output for job in jobs)
    return Comparison(
        device=device,
        lengths=lengths,
        equal=f"{rows} rows" if blocks is None else f"{blocks} blocks",
        continuous=run(costs, config, jobs, blocks).output_tokens_per_second,
        static=run(costs, static_config, jobs).output_tokens_per_second,
        padded=tokens / _padded_seconds(costs, jobs, rows),
        most_possible=tokens / floor_seconds(costs, jobs, rows if blocks is None else len(jobs)),
    )


def _even(source: random.Random, low: int, high: int) -> int:
    return source.randint(low, high)


def _skewed(source: random.Random, low: int, high: int) -> int:
    """Evenly spread logarithms: many short, few long, as people ask."""
    return round(math.exp(source.uniform(math.log(low), math.log(high))))


_LENGTHS: dict[str, Callable[[random.Random, int, int], int]] = {"even": _even, "skewed": _skewed}


def _mixed_jobs(draw: Callable[[random.Random, int, int], int]) -> list[Job]:
    source = random.Random(64)
    return [Job(0.0, draw(source, 16, 512), draw(source, 16, 256)) for _ in range(64)]


def _padded_seconds(costs: StepCosts, jobs: Sequence[Job], rows: int) -> float:
    seconds = 0.0
    for first in range(0, len(jobs), rows):
        batch = jobs[first : first + rows]
        prompt, output = max(job.prompt for job in batch), max(job.output for job in batch)
        seconds += output * costs.base + len(batch) * work_seconds(costs, prompt, output)
    return seconds


def _check_comparisons(comparisons: Sequence[Comparison]) -> list[Check]:
    checks = []
    for c in comparisons:
        if c.lengths != "even":
            continue
        possible = f"at most {c.most_possible / c.static:.2f} possible"
        checks.append(
            Check(
                f"{c.device}: continuous against static batching, the same {c.equal}",
                f"{c.ratio:.2f} times ({possible})",
                "more than 2 times",
                c.ratio > 2,
            )
        )
    return checks


def _print_comparisons(comparisons: Sequence[Comparison]) -> None:
    print_table(
        "Continuous against static batching: 64 requests, prompts 16-512, answers 16-256; output tokens/s",
        (
            *("device", "lengths", "the same", "continuous", "static", "padded"),
            *("to static", "at most", "to padded"),
        ),
        [
            (
                *(c.device, c.lengths, c.equal),
                *(f"{speed:,.0f}" for speed in (c.continuous, c.static, c.padded)),
                *(f"{c.ratio:.2f}", f"{c.most_possible / c.static:.2f}", f"{c.continuous / c.padded:.2f}"),
            )
            for c in comparisons
        ],
    )


# ---------------------------------------------------------------------- scaling


@dataclass(frozen=True)
class Scaling:
    """So many equal requests at once (128 in, 128 out)."""

    device: str
    batch: int
    tokens_per_second: float
    efficiency: float
    """Against as many times the speed of one request alone."""
    device_limit: float
    """The efficiency that the cost of a step leaves, whoever plans it."""

    @property
    def share_of_limit(self) -> float:
        return self.efficiency / self.device_limit


def measure_scaling(batches: Sequence[int] = (1, 2, 4, 8, 16)) -> list[Scaling]:
    scalings = []
    for device, costs in DEVICES.items():
        alone = run(costs, SchedulerConfig(), [Job(0.0, 128, 128)]).output_tokens_per_second
        floor_alone = floor_seconds(costs, [Job(0.0, 128, 128)], 1)
        for batch in batches:
            jobs = [Job(0.0, 128, 128)] * batch
            speed = run(costs, SchedulerConfig(), jobs).output_tokens_per_second
            limit = floor_alone / floor_seconds(costs, jobs, batch)
            scalings.append(Scaling(device, batch, speed, speed / (batch * alone), limit))
    return scalings


def _check_scaling(scalings: Sequence[Scaling]) -> list[Check]:
    return [
        Check(
            f"{s.device}: scaling efficiency to batch {s.batch}",
            f"{s.efficiency:.1%} ({s.share_of_limit:.1%} of what the device allows)",
            "more than 70%",
            s.efficiency > 0.7,
        )
        for s in scalings
        if s.batch == 16
    ]


def _print_scaling(scalings: Sequence[Scaling]) -> None:
    print_table(
        "Scaling: equal requests at once, 128 in and 128 out",
        ("device", "batch", "tokens/s", "efficiency", "device's limit", "share of it"),
        [
            (
                *(s.device, f"{s.batch}", f"{s.tokens_per_second:,.0f}", f"{s.efficiency:.1%}"),
                *(f"{s.device_limit:.1%}", f"{s.share_of_limit:.1%}"),
            )
            for s in scalings
        ],
    )


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


def measure_mix(device: str, policy: PriorityPolicy, num_seeds: int) -> Mix:
    costs = DEVICES[device]
    config = SchedulerConfig()
    name = policy.value
    if policy is PriorityPolicy.ADAPTIVE:
        config = SchedulerConfig(policy=policy, target_inter_token_latency=TARGETS[device])
        name += f", {1000 * TARGETS[device]:g} ms"
    rate = LOAD / _mean_device_seconds(costs)
    alone, mixed = [], []
    for seed in range(num_seeds):
        jobs = _poisson_jobs(random.Random(seed), rate)
        alone.append(run(costs, config, [job for job in jobs if job.prompt == SHORT[0]]))
        mixed.append(run(costs, config, jobs))
    before = [trace for result in alone for trace in result.traces]
    after = [trace for result in mixed for trace in result.traces if trace.job.prompt == SHORT[0]]
    long = [trace for result in mixed for trace in result.traces if trace.job.prompt == LONG[0]]
    return Mix(
        device=device,
        policy=name,
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


def _mean_device_seconds(costs: StepCosts) -> float:
    """Of the device's time, what one of the 110 requests takes on average where 16 share the base of a step."""
    short = work_seconds(costs, *SHORT) + costs.base * SHORT[1] / 16
    long = work_seconds(costs, *LONG) + costs.base * LONG[1] / 16
    return (100 * short + 10 * long) / 110


def _poisson_jobs(source: random.Random, rate: float) -> list[Job]:
    lengths = [SHORT] * 100 + [LONG] * 10
    source.shuffle(lengths)
    arrivals = itertools.accumulate(source.expovariate(rate) for _ in lengths)
    return [Job(arrival, *length) for arrival, length in zip(arrivals, lengths, strict=True)]


def _fragmentation(runs: Sequence[Run]) -> float:
    return sum(result.unused_cells for result in runs) / sum(result.held_cells for result in runs)


def _check_mixes(mixes: Sequence[Mix]) -> list[Check]:
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


def _print_mixes(mixes: Sequence[Mix]) -> None:
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
