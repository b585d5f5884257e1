"""The report of a soak test: checks, tables, and JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.bench.report import Check, machine, print_checks, print_line, print_table, quantile
from weft.bench.soak_client import LATE_CLIENT, Ledger
from weft.bench.soak_watch import Kill, Poll, ProcessHistory, undisturbed

HEALTH_P99_SECONDS = 0.1
LOOP_LAG_P99_SECONDS = 0.05
NOTICED_SECONDS = 1.0
GROWTH_MIB = 1.0
"""Memory does not grow if 0 MiB a minute is inside the 95% interval of the slope. If the interval reaches above this
value, it is too wide to exclude growth."""
MAX_LATE_SHARE = 0.001
"""Allowed fraction of requests that failed because the clients were late. With more, the run says little about the
server."""
LONG_ENOUGH_SECONDS = 600.0
"""Growth is checked only for a process that was observed for this long. It is measured over the last half; in shorter
runs, caches are still filling then."""
SHOWN_VIOLATIONS = 20


@dataclass(frozen=True)
class Gauges:
    """Gauges that must be back at their baseline after the load."""

    requests_open: float
    requests_running: float
    requests_waiting: float
    cache_usage: float


@dataclass(frozen=True)
class Soaked:
    """The results of one soak test."""

    what: str
    clients: int
    seconds: float
    seed: int
    load_before: float
    began: float
    ledger: Ledger
    kills: list[Kill]
    polls: list[Poll]
    histories: list[ProcessHistory]
    baseline: Gauges | None
    gauges: Gauges | None
    loop_lag: Mapping[float, int]
    """Histogram of event-loop lag: counts by upper bound in seconds. The kernel's run delay is subtracted."""
    files: tuple[int, int]

    @property
    def violations(self) -> list[str]:
        """Everything that must not happen, including errors that no kill explains."""
        unexplained = [
            f"{error.code} without a kill, {error.began - self.began:.1f} to {error.ended - self.began:.1f} s"
            for error in self.ledger.excused
            if not any(
                error.ended >= kill.at and (kill.ready is None or error.began <= kill.ready)
                for kill in self.kills
            )
        ]
        return [*self.ledger.violations, *unexplained]

    @property
    def is_clean(self) -> bool:
        return all(check.is_met for check in checks(self))


def checks(soaked: Soaked) -> list[Check]:
    count = sum(soaked.ledger.outcomes.values())
    violations = soaked.violations
    late = sum(n for (_, outcome), n in soaked.ledger.outcomes.items() if outcome == LATE_CLIENT)
    found = [
        Check("requests with a wrong result", f"{len(violations)} of {count:,}", "0", not violations),
        Check(
            "requests that failed because the clients were late",
            f"{late:,} of {count:,}; at most {soaked.ledger.lateness.longest:.1f} s late",
            f"1 in {1 / MAX_LATE_SHARE:,.0f}",
            late <= MAX_LATE_SHARE * count,
        ),
        Check(
            "open, running, waiting, cache in use",
            str(_describe(soaked.gauges)),
            "as before",
            _is_at_baseline(soaked),
        ),
        Check(
            "open files of the HTTP process",
            f"{soaked.files[0]} before, {soaked.files[1]} after",
            "no more",
            soaked.files[1] <= soaked.files[0],
        ),
    ]
    good = undisturbed(soaked.polls, soaked.kills)
    wrong = sum(poll.status != 200 for poll in good)
    found.append(
        Check("/health, other than 200 while the engine ran", f"{wrong} of {len(good)}", "0", wrong == 0)
    )
    if good:
        p99 = quantile((poll.seconds for poll in good), 0.99)
        found.append(
            Check(
                "/health p99",
                f"{1000 * p99:.0f} ms",
                f"{1000 * HEALTH_P99_SECONDS:.0f} ms",
                p99 < HEALTH_P99_SECONDS,
            )
        )
    if total := max(soaked.loop_lag.values(), default=0):
        bound = min(bound for bound, count in soaked.loop_lag.items() if count >= 0.99 * total)
        found.append(
            Check(
                "event-loop lag p99, without the kernel's run delay",
                f"at most {1000 * bound:g} ms, of {total:,}",
                f"{1000 * LOOP_LAG_P99_SECONDS:.0f} ms",
                bound <= LOOP_LAG_P99_SECONDS,
            )
        )
    for number, kill in enumerate(soaked.kills):
        noticed = None if kill.noticed is None else kill.noticed - kill.at
        ready = "never" if kill.ready is None else f"ready after {kill.ready - kill.at:.1f} s"
        found.append(
            Check(
                f"kill {number + 1}, at {kill.at - soaked.began:.0f} s",
                f"noticed after {noticed:.2f} s, {ready}" if noticed is not None else "not noticed",
                f"{NOTICED_SECONDS:g} s, and ready again",
                noticed is not None and noticed < NOTICED_SECONDS and kill.ready is not None,
            )
        )
    for history in soaked.histories:
        if history.times[-1] - history.times[0] >= LONG_ENOUGH_SECONDS:
            growth = history.growth()
            found.append(
                Check(
                    f"memory of {history.name}",
                    f"{history.mib[0]:.0f} to {history.mib[-1]:.0f} MiB; in the last half {growth.slope:+.2f} per minute, "
                    f"95% [{growth.low:+.2f}, {growth.high:+.2f}]",
                    f"0 in the interval, and at most {GROWTH_MIB:g}",
                    growth.low <= 0.0 and growth.high <= GROWTH_MIB,
                )
            )
    return found


def _is_at_baseline(soaked: Soaked) -> bool:
    return soaked.gauges == soaked.baseline


def _describe(gauges: Gauges | None) -> Any:
    return (
        "not available"
        if gauges is None
        else ", ".join(f"{value:g}" for value in dataclasses.astuple(gauges))
    )


def print_soak(soaked: Soaked) -> None:
    outcomes = soaked.ledger.outcomes
    print_line(f"{soaked.what}: {soaked.clients} clients, {soaked.seconds:.0f} s, seed {soaked.seed}")
    print_line(machine())
    print_table(
        "Requests",
        ("what the client did", "how it ended", "requests"),
        [
            (conduct.value, outcome, f"{number:,}")
            for (conduct, outcome), number in sorted(
                outcomes.items(), key=lambda item: (item[0][0].value, item[0][1])
            )
        ],
    )
    print_table("Figures", ("", "p50", "p99", "largest"), _figures(soaked))
    print_line(
        f"{soaked.ledger.num_tokens:,} tokens in complete answers, {soaked.ledger.num_tokens / soaked.seconds:,.0f} per second"
    )
    print_checks(checks(soaked))
    for violation in soaked.violations[:SHOWN_VIOLATIONS]:
        print_line(f"violation: {violation}")


def _figures(soaked: Soaked) -> list[tuple[str, ...]]:
    series = {
        "/health, ms": [poll.seconds for poll in undisturbed(soaked.polls, soaked.kills)],
        "first token of a stream, ms": soaked.ledger.first_tokens,
    }
    return [
        (name, *(f"{1000 * one:.1f}" for one in _quantiles(values)))
        for name, values in series.items()
        if values
    ]


def _quantiles(values: Sequence[float]) -> tuple[float, float, float]:
    return quantile(values, 0.5), quantile(values, 0.99), max(values)


def write_soak(soaked: Soaked, path: Path) -> None:
    document = {
        "what": soaked.what,
        "machine": machine(),
        "clients": soaked.clients,
        "seconds": soaked.seconds,
        "seed": soaked.seed,
        "load_before": soaked.load_before,
        "requests": [
            {"conduct": conduct.value, "outcome": outcome, "count": number}
            for (conduct, outcome), number in soaked.ledger.outcomes.items()
        ],
        "tokens": soaked.ledger.num_tokens,
        "first_token_seconds": soaked.ledger.first_tokens,
        "violations": soaked.violations,
        "checks": [dataclasses.asdict(check) for check in checks(soaked)],
        "kills": [
            {
                "at": kill.at - soaked.began,
                "noticed": None if kill.noticed is None else kill.noticed - kill.at,
                "ready": None if kill.ready is None else kill.ready - kill.at,
            }
            for kill in soaked.kills
        ],
        "event_loop_lag": [[str(bound), count] for bound, count in soaked.loop_lag.items()],
        "health": [(poll.due - soaked.began, poll.seconds, poll.status) for poll in soaked.polls],
        "processes": [
            {
                "name": one.name,
                "times": [at - soaked.began for at in one.times],
                "mib": one.mib,
                "files": one.files,
            }
            for one in soaked.histories
        ],
    }
    path.write_text(json.dumps(document), "utf-8")
