"""`python -m benchmarks plan-accuracy`: the predictions of `weft plan` against `weft bench serve` on the real server.

Each cell is a workload at a share of the capacity of the server. The simulation gets the lengths and arrival times of the
real run. The server checks no draft tokens: the simulation has none.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from weft.bench.report import machine, print_json, print_line, print_table
from weft.bench.serve_client import Client
from weft.bench.serve_load import Item, Phase, Text, poisson_times
from weft.bench.serve_measure import Summary, Targets
from weft.bench.serve_run import measure
from weft.bench.start import started_server, wait_for_phases
from weft.config import PriorityPolicy, SchedulerConfig, ServingEngineConfig
from weft.errors import WeftError
from weft.loading.checkpoint import open_checkpoint
from weft.loading.pull import pull
from weft.planning.fleet import FleetOutcome, FleetSettings, simulate
from weft.planning.profile import MachineProfile, read_profile
from weft.planning.replica import PlannedRequest, ReplicaSettings
from weft.planning.traces import unique_segment
from weft.text.model_text import open_model_text

WORKLOADS = ("mixed", "shared-prefix", "bursty")
LOADS = (0.4, 0.7, 0.95)
BURST = 8
_PREFIX, _PREFIXES = 512, 4
_SHARED = 1 << 36
"""Token ids of the shared prefixes in the simulation."""
_PREFIX_ROOM = 1 << 20
_TIMEOUT = 300.0


@dataclass(frozen=True)
class Wanted:
    """A request before it has text: its shared prefix, if any, its own tokens, its answer, its time."""

    prefix: int | None
    tokens: int
    answer: int
    at: float


@dataclass(frozen=True)
class Figure:
    """One figure of one cell."""

    workload: str
    load: float
    name: str
    predicted: float
    real: tuple[float, ...]
    """One for each run."""
    bar: float
    """Allowed relative difference from the median; for hit rates, the absolute one."""

    @property
    def median(self) -> float:
        return statistics.median(self.real)

    @property
    def difference(self) -> float:
        if self.name == "hit rate":
            return self.predicted - self.median
        return self.predicted / self.median - 1 if self.median else 0.0

    @property
    def spread(self) -> float:
        """The largest difference of a run from the median, as `difference`."""
        unit = 1.0 if self.name == "hit rate" else self.median or 1.0
        return max(abs(one - self.median) for one in self.real) / unit

    @property
    def is_met(self) -> bool:
        is_latency = self.name.startswith(("first", "gap"))
        return abs(self.difference) <= (max(self.bar, self.spread) if is_latency else self.bar)


def main(*, profile: str, requests: int, runs: int, workloads: Sequence[str], json: bool) -> bool:
    """Measures and prints all cells. Returns whether all bars are met."""
    unknown = [name for name in workloads if name not in WORKLOADS]
    if unknown:
        raise WeftError(f"no workload {unknown[0]!r}; there are {', '.join(WORKLOADS)}")
    known = read_profile(profile)
    tokenizer = open_model_text(open_checkpoint(pull("default"))).tokenizer
    text = Text(lambda whole: tokenizer.encode(whole, add_bos=False))
    figures: list[Figure] = []
    with started_server("default", "--drafts", "0", variables={"WEFT_SERVE_LOG_FORMAT": "off"}) as (
        port,
        process,
    ):
        wait_for_phases(port, process, time.perf_counter())
        real = partial(_real, port, text, tokenizer.decode)
        real(draw("mixed", 16, None))  # the first requests of a server are slower
        for workload in workloads or WORKLOADS:
            capacity = real(draw(workload, requests, None)).requests_per_second
            expected = predict(known, draw(workload, requests, None)).requests_per_second
            _say(f"{workload}: capacity {capacity:.2f} requests/s, predicted {expected:.2f}")
            for load in LOADS:
                wanted = draw(workload, requests, load * capacity)
                found = [real(wanted) for _ in range(runs)]
                figures += compare(workload, load, predict(known, wanted), found)
                _say(f"  at {load:.0%}")
    if json:
        print_json({"machine": machine(), "profile": known.machine, "figures": figures})
    else:
        print_figures(figures, runs)
    return all(figure.is_met for figure in figures)


def draw(workload: str, count: int, rate: float | None) -> list[Wanted]:
    """The requests of a workload. Without a rate, all arrive at once."""
    source = random.Random(f"{workload} {rate is None}")
    if rate is None:
        times = [0.0] * count
    elif workload == "bursty":
        times = [BURST / rate * (number // BURST) for number in range(count)]
    else:
        times = poisson_times(count, rate, seed=1)
    shared = workload == "shared-prefix"
    return [
        Wanted(
            source.randrange(_PREFIXES) if shared else None,
            source.randint(16, 128) if shared else source.randint(16, 512),
            source.randint(32, 96) if shared else source.randint(16, 256),
            at,
        )
        for at in times
    ]


def predict(profile: MachineProfile, wanted: Sequence[Wanted]) -> FleetOutcome:
    config = ServingEngineConfig(scheduler=SchedulerConfig(policy=PriorityPolicy.ADAPTIVE))
    requests = [
        PlannedRequest(
            number,
            one.at,
            (
                *(() if one.prefix is None else ((_SHARED + one.prefix * _PREFIX_ROOM, _PREFIX),)),
                unique_segment(number, one.tokens),
            ),
            one.answer,
        )
        for number, one in enumerate(wanted)
    ]
    settings = ReplicaSettings(profile, config, reports_keys=False)
    return simulate(FleetSettings(settings), requests, num_processes=1)


def _real(port: int, text: Text, decode: Callable[[Sequence[int]], str], wanted: Sequence[Wanted]) -> Summary:
    """One run of `weft bench serve` with new text, so that nothing is cached but what the run shares."""
    prefixes = [text.take(_PREFIX) for _ in range(_PREFIXES)]
    items = tuple(
        Item((() if one.prefix is None else prefixes[one.prefix]) + text.take(one.tokens), one.answer, one.at)
        for one in wanted
    )
    report = asyncio.run(
        measure(
            Client(f"http://127.0.0.1:{port}"),
            [Phase("cell", items)],
            targets=Targets(),
            decode=decode,
            seconds=_TIMEOUT,
            print_status=lambda line: None,
        )
    )
    phase = report.phases[0]
    if phase.summary.answered != len(items):
        raise WeftError(f"{len(items) - phase.summary.answered} requests failed: {phase.summary.failures}")
    if phase.machine.is_disturbed:
        _say(f"  disturbed by other processes: {', '.join(phase.machine.loudest)}")
    return phase.summary


def compare(workload: str, load: float, predicted: FleetOutcome, real: Sequence[Summary]) -> list[Figure]:
    total = predicted.total
    latency_bar = 0.15 if load > 0.9 else 0.10
    rows: list[tuple[str, float, Callable[[Summary], float], float]] = [
        ("output tokens/s", predicted.tokens_per_second, lambda one: one.output_tokens_per_second, 0.05),
        ("first token p50, ms", 1000 * total.first_token.quantile(0.5), _first(0.5), latency_bar),
        ("first token p99, ms", 1000 * total.first_token.quantile(0.99), _first(0.99), latency_bar),
        ("gap p99, ms", 1000 * total.gap.quantile(0.99), _gap_p99, latency_bar),
        ("hit rate", total.hit_rate, lambda one: one.cached_tokens / one.prompt_tokens, 0.03),
    ]
    return [
        Figure(workload, load, name, value, tuple(of(one) for one in real), bar)
        for name, value, of, bar in rows
    ]


def _first(share: float) -> Callable[[Summary], float]:
    def value(summary: Summary) -> float:
        assert summary.first_token is not None
        return 1000 * (summary.first_token.p50 if share == 0.5 else summary.first_token.p99)

    return value


def _gap_p99(summary: Summary) -> float:
    assert summary.gap is not None
    return 1000 * summary.gap.p99


def print_figures(figures: Sequence[Figure], runs: int) -> None:
    def shown(figure: Figure, value: float) -> str:
        return f"{value:.1%}" if figure.name == "hit rate" else f"{value:,.1f}"

    print_line(machine())
    print_table(
        f"Predicted and real, the median of {runs} {'run' if runs == 1 else 'runs'}",
        ("workload", "load", "figure", "predicted", "real", "difference", "spread of runs", "bar", "met"),
        [
            (
                *(
                    one.workload,
                    f"{one.load:.0%}",
                    one.name,
                    shown(one, one.predicted),
                    shown(one, one.median),
                ),
                *(
                    f"{one.difference:+.1%}",
                    f"{one.spread:.1%}",
                    f"{one.bar:.0%}",
                    "yes" if one.is_met else "NO",
                ),
            )
            for one in figures
        ],
    )
    print_line(f"{sum(one.is_met for one in figures)} of {len(figures)} figures are within their bars")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
