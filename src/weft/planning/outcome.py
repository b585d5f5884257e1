"""What a simulation found: histograms and sums of constant size, which can be added."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

_GROWTH = math.log(1.01)
_FIRST = 1e-6


class FineHistogram:
    """Counts in buckets that grow by 1%. Quantiles are exact within 0.5%."""

    __slots__ = ("count", "counts", "largest", "total")

    def __init__(self) -> None:
        self.counts: Counter[int] = Counter()
        self.count = 0
        self.total = 0.0
        self.largest = 0.0

    def record(self, value: float, times: int = 1) -> None:
        bucket = math.ceil(math.log(value / _FIRST) / _GROWTH) if value > _FIRST else 0
        self.counts[bucket] += times
        self.count += times
        self.total += value * times
        if value > self.largest:
            self.largest = value

    def add(self, other: FineHistogram) -> None:
        self.counts.update(other.counts)
        self.count += other.count
        self.total += other.total
        self.largest = max(self.largest, other.largest)

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0

    def quantile(self, share: float) -> float:
        """The nearest rank, in the middle of its bucket. 0 without values."""
        rank, seen = max(1, math.ceil(share * self.count)), 0
        for bucket in sorted(self.counts):
            seen += self.counts[bucket]
            if seen >= rank:
                return min(self.largest, _FIRST * math.exp((bucket - 0.5) * _GROWTH)) if bucket else 0.0
        return 0.0

    def share_within(self, limit: float) -> float:
        """The fraction of the values that are at most `limit`."""
        if not self.count:
            return 1.0
        last = math.ceil(math.log(limit / _FIRST) / _GROWTH) if limit > _FIRST else 0
        return sum(count for bucket, count in self.counts.items() if bucket <= last) / self.count

    def points(self, most: int = 200) -> list[tuple[float, float]]:
        """(value, fraction of the values up to it), for a plot."""
        found, seen = [], 0
        for bucket in sorted(self.counts):
            seen += self.counts[bucket]
            found.append((_FIRST * math.exp(bucket * _GROWTH), seen / self.count))
        step = max(1, len(found) // most)
        return [*found[:-1:step], *found[-1:]]


@dataclass
class Outcome:
    """Sums over the requests and steps of one replica, or of all."""

    requests: int = 0
    completed: int = 0
    refused: int = 0
    """Requests that the scheduler refused: too long, or its queue was full."""
    good: int = 0
    """Requests within all targets."""
    late: int = 0
    """Requests whose first token missed its target."""
    slow: int = 0
    """Requests whose gaps missed their target."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    steps: int = 0
    step_sequences: int = 0
    busy_seconds: float = 0.0
    ready_seconds: float = 0.0
    """Seconds for which replicas were ready."""
    paid_seconds: float = 0.0
    """The same with the seconds that they took to start."""
    preemptions: int = 0
    kv_peak: float = 0.0
    """The largest used fraction of the KV cache of a replica."""
    ended: float = 0.0
    """The virtual time at which the last answer ended."""
    first_token: FineHistogram = field(default_factory=FineHistogram)
    gap: FineHistogram = field(default_factory=FineHistogram)
    end_to_end: FineHistogram = field(default_factory=FineHistogram)
    limits: Counter[str] = field(default_factory=Counter)
    """For windows with a queue: what requests waited for. "rows", "KV cache" or "steps"."""

    def add(self, other: Outcome) -> None:
        for name, value in vars(other).items():
            mine = getattr(self, name)
            if isinstance(mine, FineHistogram):
                mine.add(value)
            elif isinstance(mine, Counter):
                mine.update(value)
            elif name in ("kv_peak", "ended"):
                setattr(self, name, max(mine, value))
            else:
                setattr(self, name, mine + value)

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def utilisation(self) -> float:
        """The fraction of the ready time in which steps ran."""
        return self.busy_seconds / self.ready_seconds if self.ready_seconds else 0.0

    @property
    def good_share(self) -> float:
        return self.good / self.requests if self.requests else 1.0

    @property
    def rows_per_step(self) -> float:
        return self.step_sequences / self.steps if self.steps else 0.0
