"""`python -m benchmarks lengths`: how much latency falls if requests are ordered by the lengths of their answers.

The real engine runs traffic of short and long answers (`lengths_traffic.py`) with a cost model on a virtual clock, or with
`--real` on the default model. Every order gets the same requests. "Known" orders by the real lengths, "learned" by those
that `LengthPredictor` expects, from the first request on.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from unittest.mock import patch

from benchmarks.batching import DEVICES, TARGETS, work_seconds
from benchmarks.lengths_traffic import (
    PROMPT,
    Expect,
    Job,
    Learner,
    PlaceLimit,
    mean_output,
    run,
    traffic,
)
from benchmarks.peers_environment import draw_chart
from weft.backends.cost_model import CostModelBackend
from weft.bench.ratios import Ratios
from weft.bench.report import Check, machine, print_checks, print_line, print_table, quantile
from weft.clock import Clock, VirtualClock
from weft.config import PriorityPolicy, SchedulerConfig, ServingEngineConfig
from weft.engine.serving import ServingEngine
from weft.lengths import ExpectedLength
from weft.request import numbered_ids
from weft.scheduling import policy

ROWS = 8
"""Sequences that run at once: few, so that requests wait."""
PLACES = 2 * ROWS
"""Requests that the server accepts at once, in the measurement of refusals."""
LOADS = (0.7, 0.8, 0.9, 1.0, 1.1)
BAR_LOAD = 1.0
REAL_LOAD = 3.0
"""The load with `--real`, which has few requests: these queue up only if they arrive nearly at once."""
BEST, BELOW_FCFS, LONG_P99, WAIT_ERROR, WAIT_SHARE = 1.2, 0.7, 1.3, 0.3, 0.8
"""The bars of `Report.checks`. Mean latency of "learned", relative to "known" and to FCFS; p99 of its long answers,
relative to FCFS; the allowed error of a given wait, and the fraction of waits that must be within it."""

OpenEngine = Callable[[SchedulerConfig], tuple[ServingEngine, Clock, Callable[[float], None]]]


def _known(job: Job) -> ExpectedLength:
    return ExpectedLength(job.output, job.output, job.output)


ORDERS: dict[str, tuple[PriorityPolicy, str]] = {
    "FCFS": (PriorityPolicy.FCFS, ""),
    "shortest first, known, without ageing": (PriorityPolicy.SHORTEST_JOB_FIRST, "known, without ageing"),
    "shortest first, known": (PriorityPolicy.SHORTEST_JOB_FIRST, "known"),
    "shortest first, learned": (PriorityPolicy.SHORTEST_JOB_FIRST, "learned"),
    "ADAPTIVE": (PriorityPolicy.ADAPTIVE, ""),
    "ADAPTIVE, learned": (PriorityPolicy.ADAPTIVE, "learned"),
}

REAL_ORDERS = ("FCFS", "shortest first, known", "shortest first, learned")
"""The orders with `--real`. There are few, since the model takes a minute for what the cost model does in a second."""

Figure = tuple[float, float, float]
"""A ratio to FCFS, and the ends of its 95% interval over the seeds."""


@dataclass(frozen=True)
class Cell:
    """One order at one load."""

    order: str
    load: float
    seconds: float
    """Mean latency."""
    mean: Figure
    short_mean: Figure
    long_p99: Figure
    honest: tuple[float, float] | None
    """The fractions of answers that were at most p50 and p90 long. None: the order does not learn lengths."""


@dataclass(frozen=True)
class Report:
    cells: list[Cell]
    waits: list[tuple[float, float]]
    """For each refusal: the wait that the client was given (Retry-After), and the wait until a place was free. Seconds."""

    def at(self, order: str, load: float) -> Cell | None:
        return next((cell for cell in self.cells if (cell.order, cell.load) == (order, load)), None)

    @property
    def share_right(self) -> float:
        """The fraction of given waits that are within 30% of the real ones."""
        return fmean(abs(given - real) <= WAIT_ERROR * real for given, real in self.waits)

    def checks(self, load: float) -> list[Check]:
        learned = self.at("shortest first, learned", load)
        assert learned is not None
        checks = []
        for name in ("known", "known, without ageing"):
            known = self.at(f"shortest first, {name}", load)
            if known is not None:
                ratio = learned.seconds / known.seconds
                checks.append(_at_most(f"load {load}: mean latency, learned to {name}", ratio, BEST))
        return [
            *checks,
            _at_most(f"load {load}: mean latency, learned to FCFS", learned.mean[0], BELOW_FCFS),
            _at_most(f"load {load}: p99 of long answers, learned to FCFS", learned.long_p99[0], LONG_P99),
            Check(
                f"Retry-After within {WAIT_ERROR:.0%} of the real wait",
                f"{self.share_right:.0%} of {len(self.waits)}",
                f"at least {WAIT_SHARE:.0%}",
                self.share_right >= WAIT_SHARE,
            ),
        ]


def _at_most(name: str, measured: float, bar: float) -> Check:
    return Check(name, f"{measured:.2f} times", f"at most {bar:g} times", measured <= bar)


def main(
    *, device: str, seeds: int, requests: int, real: bool, plot: Path | None, as_json: Path | None
) -> bool:
    """Measures and prints. Returns True if every bar is met at the load of the bars."""
    if real:
        from benchmarks import lengths_real

        each = lengths_real.seconds_each(ROWS)
        print_line(f"{machine()}; {each:.3f} s of the machine for each request")
        report = measure(
            lengths_real.open_engine,
            each,
            (REAL_LOAD,),
            seeds,
            requests,
            orders=REAL_ORDERS,
            num_taught=300,
        )
    else:
        report = measure(simulated(device), seconds_each(device), LOADS, seeds, requests)
    checks = report.checks(REAL_LOAD if real else BAR_LOAD)
    _print(report, seeds, requests)
    print_checks(checks)
    print_line(machine() if real else f"Virtual time, cost model of the {device}: the same on every machine.")
    if as_json is not None:
        as_json.write_text(json.dumps({**dataclasses.asdict(report), "checks": list(map(vars, checks))}))
    if plot is not None:
        draw_chart("plot_lengths", dataclasses.asdict(report), plot)
    return all(check.is_met for check in checks)


def seconds_each(device: str) -> float:
    """Device time of a request, if all rows are in use."""
    costs, output = DEVICES[device], mean_output()
    return work_seconds(costs, sum(PROMPT) // 2, round(output)) + costs.base * output / ROWS


def simulated(device: str) -> OpenEngine:
    def open_engine(config: SchedulerConfig) -> tuple[ServingEngine, Clock, Callable[[float], None]]:
        clock = VirtualClock()
        backend = CostModelBackend(clock, DEVICES[device])
        engine = ServingEngine(
            backend, ServingEngineConfig(scheduler=config), clock=clock, seed=0, new_id=numbered_ids()
        )
        return engine, clock, clock.advance_to

    return open_engine


def measure(
    open_engine: OpenEngine,
    each: float,
    loads: Sequence[float],
    seeds: int,
    requests: int,
    *,
    orders: Sequence[str] = tuple(ORDERS),
    num_taught: int = 0,
) -> Report:
    """Runs every order at every load. `each`: device seconds for a request. `num_taught`: answers that are learned before
    each run."""
    cells, waits = [], []
    for load in loads:
        runs: dict[str, list[list[Job]]] = {order: [] for order in orders}
        learners = {order: Learner() for order in orders}
        for seed in range(seeds):
            for order in orders:
                kind, lengths = ORDERS[order]
                learners[order].begin(traffic(1000 + seed, 1.0, num_taught))
                jobs = traffic(seed, load / each, requests)
                _run(open_engine, kind, lengths, learners[order], jobs)
                runs[order].append(jobs)
        cells += [_cell(order, load, runs[order], runs["FCFS"], learners[order]) for order in orders]
    for seed in range(seeds):
        learner = Learner()
        learner.begin(traffic(1000 + seed, 1.0, num_taught))
        waits += _waits(open_engine, traffic(seed, max(loads) / each, requests), learner)
    return Report(cells, waits)


def _config(kind: PriorityPolicy) -> SchedulerConfig:
    return SchedulerConfig(policy=kind, max_running=ROWS, target_inter_token_latency=TARGETS["CPU"])


def _run(
    open_engine: OpenEngine, kind: PriorityPolicy, lengths: str, learner: Learner, jobs: list[Job]
) -> None:
    expect: Expect = learner.expect if lengths == "learned" else _known if lengths else lambda job: None
    engine, clock, wait_until = open_engine(_config(kind))
    # With a huge factor, arrival has no effect on the sort key: only the cost has.
    factor = policy.OVERTAKING_FACTOR if lengths != "known, without ageing" else 1e9
    with patch.object(policy, "OVERTAKING_FACTOR", factor):
        run(engine, clock, wait_until, jobs, expect, learner.learn)


def _waits(open_engine: OpenEngine, jobs: list[Job], learner: Learner) -> list[tuple[float, float]]:
    """Runs the jobs with a limit of `PLACES`, and returns the given and the real wait of each refused client."""
    engine, clock, wait_until = open_engine(_config(PriorityPolicy.ADAPTIVE))
    limit = PlaceLimit(PLACES, clock, learner.predictor)
    run(engine, clock, wait_until, jobs, learner.expect, learner.learn, limit)
    return [(job.given_wait, job.accepted - job.arrival) for job in jobs if job.given_wait is not None]


def _cell(order: str, load: float, runs: list[list[Job]], fcfs: list[list[Job]], learner: Learner) -> Cell:
    def ratio(figure: Callable[[list[Job]], float]) -> Figure:
        mean, low, high = Ratios(list(map(figure, fcfs)), list(map(figure, runs))).change()
        return 1 + mean, 1 + low, 1 + high

    honest = None
    if learner.num_answers:
        honest = (learner.below_p50 / learner.num_answers, learner.below_p90 / learner.num_answers)
    return Cell(
        order,
        load,
        fmean(job.latency for jobs in runs for job in jobs),
        ratio(lambda jobs: fmean(job.latency for job in jobs)),
        ratio(lambda jobs: fmean(job.latency for job in jobs if not job.is_long)),
        ratio(lambda jobs: quantile([job.latency for job in jobs if job.is_long], 0.99)),
        honest,
    )


def _print(report: Report, seeds: int, requests: int) -> None:
    def times(figure: Figure) -> str:
        return "{:.2f} [{:.2f}, {:.2f}]".format(*figure)

    print_table(
        f"Short and long answers, {ROWS} rows, {requests} requests, {seeds} seeds; times FCFS with 95% intervals",
        ("order", "load", "mean s", "mean", "mean of short", "p99 of long", "at most p50, p90"),
        [
            (
                cell.order,
                f"{cell.load:g}",
                f"{cell.seconds:.2f}",
                times(cell.mean),
                times(cell.short_mean),
                times(cell.long_p99),
                "{:.0%}, {:.0%}".format(*cell.honest) if cell.honest else "",
            )
            for cell in report.cells
        ],
    )
    rows = []
    for low, high in ((0.0, 2.0), (2.0, 5.0), (5.0, 10.0), (10.0, 1e9)):
        part = [wait for wait in report.waits if low <= wait[1] < high]
        if part:
            right = Report([], part).share_right
            ratios = [given / real for given, real in part if real > 0]
            middle, tenth, last = (quantile(ratios, share) for share in (0.5, 0.1, 0.9))
            name = f"{low:g} to {high:g} s" if high < 1e9 else f"{low:g} s and more"
            rows.append((name, f"{len(part)}", f"{right:.0%}", f"{middle:.2f}", f"{tenth:.2f} to {last:.2f}"))
    print_table(
        f"Given wait of refused clients, {PLACES} places, load {max(cell.load for cell in report.cells):g}",
        ("real wait", "refusals", "within 30%", "given / real, p50", "p10 to p90"),
        rows,
    )
