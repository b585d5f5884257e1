"""Simulates replicas behind a router, one window of virtual time after another."""

from __future__ import annotations

import itertools
import math
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from weft.errors import WeftError
from weft.planning.autoscaler import Autoscaler, Autoscaling, FleetLoad
from weft.planning.outcome import Outcome
from weft.planning.replica import PlannedRequest, ReplicaReport, ReplicaSettings
from weft.planning.workers import Workers
from weft.routing import NO_LOAD, ReplicaLoad, Router, key_of
from weft.scheduling.cache.block_pool import extend_block_hashes, root_hash

REPORT_SECONDS = 0.25
"""The length of a window: replicas report their state this often."""
MAX_POINTS = 150
"""Points of the course over time. When there are twice as many, each two become one."""


@dataclass(frozen=True)
class FleetSettings:
    replica: ReplicaSettings
    replicas: int = 1
    """How many there are from the beginning; with autoscaling, at first."""
    autoscaling: Autoscaling | None = None
    by_prefix: bool = True
    """Whether the router counts cached blocks."""


@dataclass
class Point:
    """The state over a span of time: means, but for `first_token`, which is the largest."""

    until: float
    windows: int
    arrivals: int
    replicas: float
    waiting: float
    running: float
    busy: float
    first_token: float

    def joined(self, other: Point) -> Point:
        count = self.windows + other.windows

        def mean(name: str) -> float:
            return float(sum(one.windows * getattr(one, name) for one in (self, other)) / count)

        return Point(
            until=other.until,
            windows=count,
            arrivals=self.arrivals + other.arrivals,
            replicas=mean("replicas"),
            waiting=mean("waiting"),
            running=mean("running"),
            busy=mean("busy"),
            first_token=max(self.first_token, other.first_token),
        )


@dataclass
class FleetOutcome:
    total: Outcome
    points: list[Point]
    most_replicas: int
    seconds: float
    """Virtual seconds from the first arrival to the end of the last answer."""
    by_replica: dict[int, int] = field(default_factory=dict)
    """Requests by the number of a replica. A new replica may get the number of a removed one."""

    @property
    def requests_per_second(self) -> float:
        return self.total.completed / self.seconds if self.seconds else 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.total.output_tokens / self.seconds if self.seconds else 0.0

    @property
    def mean_replicas(self) -> float:
        return self.total.ready_seconds / self.seconds if self.seconds else 0.0


@dataclass
class _Member:
    """A replica, as the fleet sees it."""

    ready_at: float
    paid_from: float
    load: ReplicaLoad = NO_LOAD
    busy_seconds: float = 0.0
    is_idle: bool = True
    is_ready: bool = False
    is_draining: bool = False
    waiting: int = 0
    reading_seconds: float = 0.0


def simulate(
    settings: FleetSettings,
    requests: Iterable[PlannedRequest],
    num_processes: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> FleetOutcome:
    """Runs all requests. Only those of the current window, and those in the replicas, are in memory."""
    with Workers(settings.replica, num_processes) as workers:
        return Fleet(settings, workers).run(iter(requests), progress)


class Fleet:
    """Owns the members, the router, the autoscaler, and the course over time."""

    def __init__(self, settings: FleetSettings, workers: Workers) -> None:
        self._settings = settings
        self._workers = workers
        self._block_size = settings.replica.config.cache.block_size
        self._router = Router(self._block_size, by_prefix=settings.by_prefix)
        scaling = settings.autoscaling
        has_choice = settings.replicas > 1 or scaling is not None
        self._needs_keys = settings.by_prefix and settings.replica.reports_keys and has_choice
        self._autoscaler = Autoscaler(scaling) if scaling is not None else None
        self._members: dict[int, _Member] = {}
        self._root = root_hash("", "")
        self._requests: Iterator[PlannedRequest] = iter(())
        self._upcoming: PlannedRequest | None = None
        """The next request, which was read but has not arrived."""
        self._arrived: list[tuple[PlannedRequest, list[int]]] = []
        """Requests that arrive next, with the keys of their blocks."""
        self._total = Outcome()
        self._points: list[Point] = []
        self._windows_per_point = 1
        self._by_replica: Counter[int] = Counter()
        self._most = 0
        for _ in range(settings.replicas):
            self._start(0.0, 0.0)
        self._make_ready(0.0)

    def run(
        self, requests: Iterator[PlannedRequest], progress: Callable[[int], None] | None = None
    ) -> FleetOutcome:
        self._requests = requests
        self._upcoming = next(requests, None)
        if self._upcoming is None:
            raise WeftError("the load has no requests")
        window = 0
        while True:
            horizon = (window + 1) * REPORT_SECONDS
            self._make_ready(window * REPORT_SECONDS)
            assigned: dict[int, list[PlannedRequest]] = {}
            self._read_until(horizon)
            arrivals = len(self._arrived)
            for request, keys in self._arrived:
                assigned.setdefault(self._route(request, keys), []).append(request)
            self._arrived.clear()
            self._workers.begin(horizon, assigned)
            self._read_until(horizon + REPORT_SECONDS)  # while the replicas run
            reports = self._workers.reports()
            busy, first_tokens = self._take(reports)
            self._record(horizon, arrivals, busy, max(first_tokens, default=0.0))
            self._scale(horizon, busy, first_tokens)
            if progress is not None and arrivals:
                progress(arrivals)
            window += 1
            if all(member.is_idle for member in self._members.values()):
                if self._upcoming is None and not self._arrived:
                    return self._end()
                if self._is_settled() and not self._arrived:  # nothing happens until the next arrival
                    assert self._upcoming is not None
                    skipped = max(0, math.ceil(self._upcoming.at / REPORT_SECONDS) - 1 - window)
                    window += skipped
                    if self._autoscaler is not None:
                        self._autoscaler.rest(skipped)

    # ------------------------------------------------------------------ requests and reports

    def _read_until(self, moment: float) -> None:
        """Reads the requests that arrive by then, and computes their keys."""
        while self._upcoming is not None and self._upcoming.at <= moment:
            request = self._upcoming
            keys: list[int] = []
            if self._needs_keys:
                hashes: list[bytes] = []
                extend_block_hashes(hashes, self._root, request.prompt(), self._block_size)
                keys = [key_of(one) for one in hashes]
            self._arrived.append((request, keys))
            self._upcoming = next(self._requests, None)

    def _route(self, request: PlannedRequest, keys: list[int]) -> int:
        number = self._router.choose(keys, request.prompt_tokens, request.session)
        member = self._members[number]
        assert member.is_ready and not member.is_draining, "a replica got a request that accepts none"
        self._by_replica[number] += 1
        member.is_idle = False
        return number

    def _take(self, reports: dict[int, ReplicaReport]) -> tuple[float, list[float]]:
        """Passes reports to the router. Returns the busy fraction of the ready replicas, and the times to first tokens."""
        busy, first_tokens = 0.0, list[float]()
        for number, report in reports.items():
            member = self._members[number]
            busy += report.busy_seconds - member.busy_seconds
            member.busy_seconds, member.load = report.busy_seconds, report.load
            member.is_idle, member.waiting = report.is_idle, report.waiting
            member.reading_seconds = report.reading_seconds
            first_tokens += report.first_tokens
            added, removed = array("Q", report.added), array("Q", report.removed)
            if self._needs_keys:
                self._router.report(number, report.load, added, removed)
            else:
                self._router.report(number, report.load)
        ready = sum(member.is_ready for member in self._members.values())
        return busy / REPORT_SECONDS / max(1, ready), first_tokens

    # ------------------------------------------------------------------ replicas come and go

    def _start(self, now: float, seconds: float) -> None:
        number = next(number for number in itertools.count() if number not in self._members)
        self._members[number] = _Member(ready_at=now + seconds, paid_from=now)

    def _make_ready(self, now: float) -> None:
        for number, member in self._members.items():
            if not member.is_ready and member.ready_at <= now:
                member.is_ready = True
                self._workers.create(number, now)
                self._router.add(number)
        self._most = max(self._most, sum(member.is_ready for member in self._members.values()))

    def _is_settled(self) -> bool:
        """Whether the number of replicas stays as it is while no request arrives. All replicas must be idle."""
        if self._autoscaler is None:
            return True
        members = self._members.values()
        is_least = len(members) == self._autoscaler.settings.least
        return is_least and all(one.is_ready and not one.is_draining for one in members)

    def _scale(self, now: float, busy: float, first_tokens: Sequence[float]) -> None:
        if self._autoscaler is None:
            return
        members = self._members
        for number in [n for n, one in members.items() if one.is_draining and one.is_idle]:
            self._remove(number, now)
        ready = [number for number, one in members.items() if one.is_ready and not one.is_draining]
        starting = sum(not one.is_ready for one in members.values())
        waits = [
            one.reading_seconds + one.load.waiting_tokens * one.load.token_seconds
            for one in map(members.__getitem__, ready)
        ]
        late = sum(one > self._autoscaler.settings.first_token for one in first_tokens)
        load = FleetLoad(len(ready), starting, sum(waits) / len(waits), len(first_tokens), late, busy)
        wanted = self._autoscaler.wanted(now, load)
        for _ in range(wanted - len(ready) - starting):
            self._start(now, self._autoscaler.settings.start_seconds)
        if wanted < len(ready) + starting:
            leaving = min(ready, key=lambda number: (members[number].load.running, -number))
            members[leaving].is_draining = True
            self._router.drain(leaving)

    def _remove(self, number: int, now: float) -> None:
        """Removes a replica that has been drained."""
        member = self._members.pop(number)
        self._router.remove(number)
        self._total.add(self._workers.finish(number))
        self._pay(member, now)

    def _pay(self, member: _Member, until: float) -> None:
        self._total.paid_seconds += until - member.paid_from
        self._total.ready_seconds += max(0.0, until - member.ready_at)

    # ------------------------------------------------------------------ the course over time

    def _record(self, now: float, arrivals: int, busy: float, first_token: float) -> None:
        members = [one for one in self._members.values() if one.is_ready]
        waiting = sum(one.waiting for one in members)
        running = sum(one.load.running for one in members)
        point = Point(now, 1, arrivals, len(members), waiting, running, busy, first_token)
        points = self._points
        if points and points[-1].windows < self._windows_per_point:
            points[-1] = points[-1].joined(point)
        else:
            points.append(point)
        if len(points) > 2 * MAX_POINTS:
            pairs = zip(points[::2], points[1::2], strict=False)
            self._points = [one.joined(other) for one, other in pairs] + points[len(points) // 2 * 2 :]
            self._windows_per_point *= 2

    def _end(self) -> FleetOutcome:
        total = self._total
        for number, member in self._members.items():
            if member.is_ready:
                total.add(self._workers.finish(number))
        for member in self._members.values():
            self._pay(member, max(member.paid_from, total.ended))
        by_replica = dict(sorted(self._by_replica.items()))
        return FleetOutcome(total, self._points, self._most, total.ended, by_replica)
