"""Measured values: histograms, rates, and the snapshot of the engine that `metrics()` returns."""

from __future__ import annotations

import math
from dataclasses import dataclass

from weft.request import RequestId


class Histogram:
    """Counts in buckets that grow by 10%, from a microsecond to a day. Quantiles are exact within 5%."""

    FIRST = 1e-6
    GROWTH = 1.1
    NUM_BUCKETS = 265

    def __init__(self) -> None:
        self.counts = [0] * (self.NUM_BUCKETS + 1)
        self.count = 0
        self.total = 0.0
        self.largest = 0.0

    def record(self, value: float, times: int = 1) -> None:
        bucket = 0
        if value > self.FIRST:
            bucket = min(int(math.log(value / self.FIRST) / _LOG_GROWTH) + 1, self.NUM_BUCKETS)
        self.counts[bucket] += times
        self.count += times
        self.total += value * times
        self.largest = max(self.largest, value)

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0

    def quantile(self, share: float) -> float:
        """The value that a `share` of the recorded values does not exceed, up to the width of a bucket."""
        if not self.count:
            return 0.0
        rank = max(1, math.ceil(share * self.count))
        seen = 0
        for bucket, count in enumerate(self.counts):
            seen += count
            if seen >= rank:
                if bucket == 0:
                    return min(self.FIRST, self.largest)
                if bucket == self.NUM_BUCKETS:
                    return self.largest
                middle: float = self.FIRST * self.GROWTH ** (bucket - 0.5)
                return min(middle, self.largest)
        return self.largest

    def summary(self) -> LatencySummary:
        return LatencySummary(
            self.count, self.mean, self.quantile(0.5), self.quantile(0.9), self.quantile(0.99), self.largest
        )


_LOG_GROWTH = math.log(Histogram.GROWTH)


class RecentRate:
    """Events per second over the last ten seconds, counted per whole second of the clock."""

    SECONDS = 10

    def __init__(self, start: float) -> None:
        self._start = start
        self._counts: dict[int, int] = {}

    def record(self, now: float, count: int) -> None:
        second = math.floor(now)
        if second in self._counts:
            self._counts[second] += count
            return
        first = self._first(now)
        self._counts = {old: number for old, number in self._counts.items() if old >= first}
        self._counts[second] = count

    def per_second(self, now: float) -> float:
        first = self._first(now)
        recent = sum(number for second, number in self._counts.items() if second >= first)
        return recent / max(now - max(first, self._start), 1e-9)

    def _first(self, now: float) -> int:
        return math.floor(now) - self.SECONDS + 1


@dataclass(frozen=True, slots=True)
class LatencySummary:
    """Statistics of a latency, in seconds."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    largest: float


@dataclass(frozen=True, slots=True)
class Slot:
    """One row, and its request, if any."""

    row: int
    state: str
    """idle, prefilling, decoding, or preempted (its swap-in is in flight)."""
    request_id: RequestId | None
    context_used: int
    context_limit: int
    tokens_per_second: float | None


@dataclass(frozen=True, slots=True)
class TwoTierKvCache:
    """What the current requests hold in each tier of a two-tier cache, and the moves since the start."""

    tail_tokens: int
    """Token positions of the full blocks in use: tails, and prompts in progress."""
    store_tokens: int
    tail_bytes: int
    store_bytes: int
    compression_ratio: float
    """Bytes that a one-tier cache would need for the same tokens, over the bytes in use. 1 if none are in use."""
    migrations: int
    """Blocks that left a tail and moved to the store."""
    migrations_shared: int
    """Of these, blocks whose content the store held already: nothing was copied."""


@dataclass(frozen=True, slots=True)
class ServingMetrics:
    """A snapshot of the engine, with totals since its start."""

    uptime: float
    requests_pending: int
    requests_running: int
    requests_preempted: int
    requests_completed: int
    requests_failed: int
    requests_cancelled: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    drafted_tokens: int
    """Draft tokens that steps checked."""
    accepted_drafts: int
    """Draft tokens that were accepted."""
    steps: int
    preemptions: int
    requests_per_second: float
    """Since the start."""
    tokens_per_second: float
    """Generated in the last ten seconds."""
    latency: LatencySummary
    time_to_first_token: LatencySummary
    inter_token_latency: LatencySummary
    waiting_time: LatencySummary
    batch_utilisation: float
    """The share of rows in use."""
    cache_utilisation: float
    """The share of the cache memory in use."""
    slots: tuple[Slot, ...]
    two_tier: TwoTierKvCache | None = None
    """None: the cache has one tier."""
