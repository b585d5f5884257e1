"""`python -m benchmarks plan-scale`: how long a simulation of many requests takes, and how much memory.

Runs two sizes of the same load on the same replicas, compares their times, and extrapolates to a million requests.
"""

from __future__ import annotations

import os
import resource
import time
from dataclasses import dataclass

from weft.backends.registry import GPU_BUDGETS
from weft.bench.report import machine, print_json, print_line, print_table
from weft.config import PriorityPolicy, SchedulerConfig, ServingEngineConfig
from weft.planning.description import Description, described, parse_lengths
from weft.planning.fleet import FleetSettings, simulate
from weft.planning.profile import read_profile
from weft.planning.replica import ReplicaSettings, Targets

MILLION = 1_000_000


@dataclass(frozen=True)
class Run:
    """One simulation."""

    requests: int
    wall_seconds: float
    cpu_seconds: float
    """Processor time of all processes. Other load on the machine hardly changes it."""
    virtual_seconds: float
    tokens: int
    """Prompt and output tokens."""
    steps: int
    rows_per_step: float
    peak_mib: float
    """Resident memory of this process and of the largest worker."""
    good_share: float
    hit_rate: float


def main(
    *, profile: str, requests: list[int], replicas: int, rate: float, prompt: str, answer: str, prefix: int,
    jobs: int | None, json: bool,
) -> None:  # fmt: skip
    runs = [_run(profile, count, replicas, rate, prompt, answer, prefix, jobs) for count in requests]
    last = runs[-1]
    minutes = last.wall_seconds / last.requests * MILLION / 60
    cores = jobs or len(os.sched_getaffinity(0))
    of_cores = last.cpu_seconds / cores / last.requests * MILLION / 60
    if json:
        print_json({"machine": machine(), "runs": runs, "minutes_for_a_million": minutes})
        return
    print_line(machine())
    print_table(
        f"{replicas} replicas of {profile}, {rate:g} requests/s, {jobs or len(os.sched_getaffinity(0))} processes",
        (
            *("requests", "wall s", "CPU s", "CPU us/token", "virtual s", "tokens", "steps"),
            *("rows/step", "MiB", "good", "hits"),
        ),
        [
            (
                *(
                    f"{one.requests:,}",
                    f"{one.wall_seconds:.1f}",
                    f"{one.cpu_seconds:.1f}",
                ),
                *(
                    f"{1e6 * one.cpu_seconds / one.tokens:.3f}",
                    f"{one.virtual_seconds:,.0f}",
                    f"{one.tokens:,}",
                ),
                *(f"{one.steps:,}", f"{one.rows_per_step:.1f}", f"{one.peak_mib:.0f}"),
                *(f"{one.good_share:.1%}", f"{one.hit_rate:.1%}"),
            )
            for one in runs
        ],
    )
    if len(runs) > 1:
        ratio = (last.cpu_seconds / last.tokens) / (runs[0].cpu_seconds / runs[0].tokens)
        print_line(
            f"processor time for a token, {last.requests:,} to {runs[0].requests:,} requests: {ratio:.2f} times"
        )
    print_line(
        f"a million requests, extrapolated from the last run: {minutes:.1f} minutes here, {of_cores:.1f} with {cores} idle cores"
    )


def _run(
    profile: str,
    count: int,
    replicas: int,
    rate: float,
    prompt: str,
    answer: str,
    prefix: int,
    jobs: int | None,
) -> Run:
    known = read_profile(profile)
    budgets = GPU_BUDGETS if known.is_gpu else {}
    scheduler = SchedulerConfig(policy=PriorityPolicy.ADAPTIVE, **budgets)
    load = Description(
        rate,
        count,
        parse_lengths(prompt, "prompt"),
        parse_lengths(answer, "answer"),
        prefix=prefix,
        prefixes=256,
    )
    settings = ReplicaSettings(
        known, ServingEngineConfig(scheduler=scheduler), targets=Targets(first_token=2.0)
    )
    began, before = time.perf_counter(), _cpu_seconds()
    outcome = simulate(
        FleetSettings(settings, replicas), described(load, context=known.room.max_context), jobs
    )
    wall, total = time.perf_counter() - began, outcome.total
    kib = sum(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    tokens = total.prompt_tokens + total.output_tokens
    cpu = _cpu_seconds() - before
    return Run(
        count, wall, cpu, outcome.seconds, tokens, total.steps, total.rows_per_step, kib / 1024, total.good_share,
        total.hit_rate,
    )  # fmt: skip


def _cpu_seconds() -> float:
    """Processor time of this process and of those that ended."""
    return sum(os.times()[:4])
