"""`python -m benchmarks batching`: how good the plans are, with the real engine, a cost model and a virtual clock.

Three measurements: continuous against static batching, throughput by batch size, and the effect of long requests on
short ones. There are two simulated devices. A small CPU is bound by arithmetic: a larger batch hardly makes a token
cheaper. A GPU is bound by reading its weights: more requests in a batch cost almost nothing.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
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
from weft.backends.cost_model import H200_LLAMA_8B, ZEN3_SMOLLM2_135M, CostModelBackend, StepCosts
from weft.bench.report import Check, print_checks, print_json, print_line, print_table
from weft.clock import VirtualClock
from weft.config import KvCachePoolConfig, PriorityPolicy, SchedulerConfig, ServingEngineConfig
from weft.engine.serving import ServingEngine
from weft.request import numbered_ids

DEVICES = {"CPU": ZEN3_SMOLLM2_135M, "H200": H200_LLAMA_8B}
TARGETS = {"CPU": 0.1, "H200": 0.006}
"""Target inter-token latency of the ADAPTIVE policy, in seconds. On the H200 it is 1.5 times a decode step."""


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
            *check_mixes(self.long_and_short),
        ]


def main(json: bool = False, quick: bool = False) -> None:
    report = measure_all(quick)
    if json:
        print_json({**vars(report), "checks": report.checks})
        return
    _print_comparisons(report.static)
    _print_scaling(report.scaling)
    print_mixes(report.long_and_short)
    print_checks(report.checks)
    print_line("Virtual time: the figures follow from the cost model and are the same on every machine.")


def measure_all(quick: bool = False) -> Report:
    """Runs all measurements; `quick` uses one seed instead of three for the mix of long and short requests."""
    policies = (PriorityPolicy.FCFS, PriorityPolicy.ADAPTIVE)
    num_seeds = 1 if quick else 3
    mixes = [measure_mix(*which, num_seeds) for which in itertools.product(DEVICES, policies)]
    return Report(compare_with_static(), measure_scaling(), mixes)


def run(costs: StepCosts, config: SchedulerConfig, jobs: Sequence[Job], num_blocks: int | None = None) -> Run:
    """Runs the jobs through an engine with this scheduler configuration. Other settings have their defaults."""
    clock = VirtualClock()
    engine_config = ServingEngineConfig(scheduler=config, cache=KvCachePoolConfig(num_blocks=num_blocks))
    engine = ServingEngine(
        CostModelBackend(clock, costs), engine_config, clock=clock, seed=0, new_id=numbered_ids()
    )
    return run_jobs(engine, clock, clock.advance_to, jobs)


def work_seconds(costs: StepCosts, prompt: int, output: int) -> float:
    """Cost of a request without the base cost of its steps: its prompt in one chunk, then its decodes."""
    decodes = output - 1
    decoded_context = decodes * prompt + decodes * (decodes + 1) // 2
    return (
        costs.per_token * (prompt + decodes)
        + costs.per_context * (prompt + decoded_context)
        + costs.per_pair * (prompt * (prompt + 1) // 2 + decoded_context)
    )


def floor_seconds(costs: StepCosts, jobs: Sequence[Job], rows: int) -> float:
    """The shortest time that any scheduler could reach: every step is full, no prompt is split, and no request runs
    alone at the end."""
    steps = max(max(job.output for job in jobs), math.ceil(sum(job.output for job in jobs) / rows))
    return costs.base * steps + sum(work_seconds(costs, job.prompt, job.output) for job in jobs)


# ---------------------------------------------------------------------- continuous against static


@dataclass(frozen=True)
class Comparison:
    """One workload with continuous and with static batching. A static batch runs to its end before the next starts."""

    device: str
    lengths: str
    equal: str
    """The resource of which both kinds of batching have the same amount: rows, or KV blocks."""
    continuous: float
    """Output tokens per second. `static` and `padded` have the same unit."""
    static: float
    padded: float
    """Speed of static batching if every batch is padded to its longest prompt and answer, as `generate` of transformers
    does."""
    most_possible: float
    """Upper bound of `continuous`: no row is ever empty, and nothing is computed twice."""

    @property
    def ratio(self) -> float:
        return self.continuous / self.static


def compare_with_static(rows: int = 16) -> list[Comparison]:
    """Compares continuous with static batching for 64 requests at once: prompts of 16 to 512 tokens, answers of 16 to
    256."""
    return [
        _compare(device, lengths, equal, rows)
        for device in DEVICES
        for lengths, equal in (("even", "rows"), ("skewed", "rows"), ("even", "memory"), ("skewed", "memory"))
    ]


def _compare(device: str, lengths: str, equal: str, rows: int) -> Comparison:
    costs, jobs = DEVICES[device], mixed_jobs(lengths)
    # The token budget allows a whole batch in one step: with less, a static batch would start half empty and look
    # worse.
    prompt_tokens = rows * 512
    static_config = SchedulerConfig(
        dynamic_batching=False,
        max_running=rows,
        max_tokens_per_step=prompt_tokens + rows,
        max_prefill_tokens=prompt_tokens,
    )
    # A static batch reserves KV blocks for the longest sequence in every row. With paging, other sequences use the
    # blocks that a short one leaves.
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
    """`batch` equal requests at once (128 prompt tokens, 128 output tokens)."""

    device: str
    batch: int
    tokens_per_second: float
    efficiency: float
    """The speed, relative to `batch` times the speed of one request alone."""
    device_limit: float
    """Upper bound of the efficiency for any scheduler, from the cost of a step."""

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
            f"{s.efficiency:.1%} ({s.share_of_limit:.1%} of the limit of the device)",
            "more than 70%",
            s.efficiency > 0.7,
        )
        for s in scalings
        if s.batch == 16
    ]


def _print_scaling(scalings: Sequence[Scaling]) -> None:
    print_table(
        "Scaling: equal requests at once, 128 in and 128 out",
        ("device", "batch", "tokens/s", "efficiency", "device limit", "share of limit"),
        [
            (
                *(s.device, f"{s.batch}", f"{s.tokens_per_second:,.0f}", f"{s.efficiency:.1%}"),
                *(f"{s.device_limit:.1%}", f"{s.share_of_limit:.1%}"),
            )
            for s in scalings
        ],
    )


# ---------------------------------------------------------------------- long and short requests


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
        jobs = poisson_jobs(random.Random(seed), rate)
        alone.append(run(costs, config, [job for job in jobs if job.prompt == SHORT[0]]))
        mixed.append(run(costs, config, jobs))
    return mix_of(device, name, rate, alone, mixed)


def _mean_device_seconds(costs: StepCosts) -> float:
    """Mean device time of one of the 110 requests, if 16 requests share the base cost of a step."""
    short = work_seconds(costs, *SHORT) + costs.base * SHORT[1] / 16
    long = work_seconds(costs, *LONG) + costs.base * LONG[1] / 16
    return (100 * short + 10 * long) / 110
