"""Measured values: histograms, rates, the snapshot that `metrics()` of an engine returns, and its Prometheus series."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from weft.request import RequestId

STEP_SECONDS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05),
    *(0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0),
)
"""Upper bounds of the buckets of step times."""


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
        """The quantile `share`, from 0 to 1: 0.99 is the 99th percentile. It is the middle of a bucket: exact
        within 5%."""
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


@dataclass(slots=True)
class Buckets:
    """Counts in buckets with given upper bounds: a histogram of Prometheus."""

    bounds: tuple[float, ...]
    counts: list[int]
    """One for each bound, and one for the last bucket, which has no bound."""
    total: float = 0.0
    """The sum of all values."""

    @classmethod
    def of(cls, bounds: tuple[float, ...]) -> Buckets:
        return cls(bounds, [0] * (len(bounds) + 1))

    def record(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def copy(self) -> Buckets:
        return Buckets(self.bounds, self.counts.copy(), self.total)


def _step_buckets() -> Buckets:
    return Buckets.of(STEP_SECONDS)


@dataclass(slots=True)
class StepSeconds:
    """Durations of steps with tokens, by kind."""

    decode: Buckets = field(default_factory=_step_buckets)
    """Steps without prompts."""
    prefill: Buckets = field(default_factory=_step_buckets)
    """Steps with prompts only."""
    mixed: Buckets = field(default_factory=_step_buckets)

    def copy(self) -> StepSeconds:
        return StepSeconds(self.decode.copy(), self.prefill.copy(), self.mixed.copy())


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
    """idle, prefilling, decoding, paused (idle work beside interactive requests), or preempted (its swap-in is in
    flight)."""
    request_id: RequestId | None
    context_used: int
    context_limit: int
    tokens_per_second: float | None


@dataclass(frozen=True, slots=True)
class TwoTierKvCache:
    """What the current requests hold in each tier of a two-tier cache, and the moves since the start."""

    tail_tokens: int
    """Token positions in the full blocks in use: those of tails and of prompts in prefill."""
    store_tokens: int
    tail_bytes: int
    store_bytes: int
    compression_ratio: float
    """Bytes that a one-tier cache would need for the same tokens, divided by the bytes in use. 1 if none are in use."""
    migrations: int
    """Blocks that left a tail and moved to the store."""
    migrations_shared: int
    """Of the migrations, blocks whose content the store held already: nothing was copied."""


@dataclass(frozen=True, slots=True)
class BlockStates:
    """The KV blocks of one tier, by state. Every block is in one of them."""

    free: int
    used: int
    """Blocks that requests hold."""
    cached: int
    """Blocks that no request holds, with content for prefix hits. They can be evicted."""
    hot: int
    """Cached blocks of sessions, which are evicted last."""
    idle: int
    """Cached blocks of idle work, which are evicted first."""


@dataclass(slots=True)
class Evictions:
    """Evicted KV blocks of one tier since the start, by the state that they were in."""

    cached: int = 0
    hot: int = 0
    idle: int = 0

    def copy(self) -> Evictions:
        return replace(self)


@dataclass(slots=True)
class SchedulerStats:
    """Totals of the scheduler since the start."""

    steps: int = 0
    step_sequences: int = 0
    """Sequences in all steps: one that is in ten steps counts ten times."""
    tokens_computed: int = 0
    prompt_tokens: int = 0
    prompt_tokens_cached: int = 0
    tokens_generated: int = 0
    tokens_drafted: int = 0
    drafts_accepted: int = 0
    learned_drafts: int = 0
    """Of the draft tokens, those from finished answers."""
    learned_drafts_accepted: int = 0
    learned_seconds_saved: float = 0.0
    """Estimated seconds that the accepted learned draft tokens saved, minus those that the rejected ones cost."""
    preemptions_by_recompute: int = 0
    preemptions_by_swap: int = 0
    preemptions_for_memory: int = 0
    """A running sequence lacked KV blocks: another sequence, or itself, was preempted."""
    preemptions_for_priority: int = 0
    """A waiting sequence of higher priority needed the row or the KV blocks."""
    preemptions_for_interactive: int = 0
    """Idle work made room for interactive sequences."""
    swap_bytes_out: int = 0
    """Bytes that planned swaps copy to swap slots."""
    swap_bytes_in: int = 0
    steps_failed: int = 0
    swaps_failed: int = 0
    ttft_targets_missed: int = 0

    @property
    def preemptions(self) -> int:
        return self.preemptions_by_recompute + self.preemptions_by_swap


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
    totals: SchedulerStats
    requests_per_second: float
    """Finished requests per second, on average since the start of the engine."""
    tokens_per_second: float
    """Generated tokens per second, in the last ten seconds."""
    latency: LatencySummary
    time_to_first_token: LatencySummary
    inter_token_latency: LatencySummary
    waiting_time: LatencySummary
    batch_utilisation: float
    """The fraction of rows in use."""
    cache_utilisation: float
    """The fraction of the cache memory in use."""
    slots: tuple[Slot, ...]
    step_seconds: StepSeconds
    blocks: BlockStates
    evictions: Evictions
    swap_slots_used: int
    swap_slots_free: int
    two_tier: TwoTierKvCache | None = None
    """None: the cache has one tier. Then the fields below are None too."""
    store_blocks: BlockStates | None = None
    store_evictions: Evictions | None = None
    learned_tokens: int = 0
    """Tokens of finished answers in the index of learned draft tokens."""
    learned_bytes: int = 0

    @property
    def prompt_tokens(self) -> int:
        return self.totals.prompt_tokens

    @property
    def cached_tokens(self) -> int:
        return self.totals.prompt_tokens_cached

    @property
    def generated_tokens(self) -> int:
        return self.totals.tokens_generated

    @property
    def drafted_tokens(self) -> int:
        """Draft tokens that steps checked."""
        return self.totals.tokens_drafted

    @property
    def accepted_drafts(self) -> int:
        return self.totals.drafts_accepted

    @property
    def steps(self) -> int:
        return self.totals.steps

    @property
    def preemptions(self) -> int:
        return self.totals.preemptions


class EngineSeries(NamedTuple):
    """A series of `/metrics` that shows a figure of the engine."""

    name: str
    figure: str
    """The attribute of `ServingMetrics`, such as `totals.steps_failed`."""
    kind: Literal["gauge", "counter", "histogram"]
    help: str
    labels: tuple[tuple[str, str], ...] = ()
    """Names and values of the labels. Series with the same name have labels with the same names."""
    without_engine: float = 0.0
    """The value of a gauge while the engine is down. Counters and histograms keep their values."""

    @property
    def is_two_tier(self) -> bool:
        return self.figure.startswith(("two_tier.", "store_"))


def _labelled(
    name: str,
    kind: Literal["gauge", "counter", "histogram"],
    help: str,
    label: str,
    figures: Mapping[str, str],
    *more_labels: tuple[str, str],
) -> tuple[EngineSeries, ...]:
    """One series for each value of `label`. `figures`: value of the label -> figure."""
    return tuple(
        EngineSeries(name, figure, kind, help, (*more_labels, (label, value)))
        for value, figure in figures.items()
    )


def _blocks_of_tier(tier: str, prefix: str) -> tuple[EngineSeries, ...]:
    """The series of one tier. The names of its fields in `ServingMetrics` begin with `prefix`."""
    states = ("free", "used", "cached", "hot", "idle")
    return (
        *_labelled(
            "kv_cache_blocks",
            "gauge",
            "KV blocks, by tier (full, store) and state: free; used by requests; cached; hot: cached and kept by a "
            "session; idle: cached content of idle work.",
            "state",
            {state: f"{prefix}blocks.{state}" for state in states},
            ("tier", tier),
        ),
        *_labelled(
            "kv_cache_evictions",
            "counter",
            "Evicted KV blocks, by tier and by their state before.",
            "state",
            {state: f"{prefix}evictions.{state}" for state in states[2:]},
            ("tier", tier),
        ),
    )


ENGINE_SERIES = (
    EngineSeries("num_requests_running", "requests_running", "gauge", "Sequences that take part in steps."),
    EngineSeries(
        "kv_cache_usage_perc", "cache_utilisation", "gauge", "Fraction of KV blocks in use, 0 to 1."
    ),
    EngineSeries("batch_usage_perc", "batch_utilisation", "gauge", "Fraction of the rows in use, 0 to 1."),
    *_labelled(
        "step_seconds",
        "histogram",
        "Seconds of a step, by kind: decode, prefill (prompts only), mixed.",
        "kind",
        {kind: f"step_seconds.{kind}" for kind in ("decode", "prefill", "mixed")},
    ),
    EngineSeries("steps", "totals.steps", "counter", "Steps."),
    EngineSeries(
        "step_sequences",
        "totals.step_sequences",
        "counter",
        "Sequences in all steps. Divided by the steps: the mean batch size.",
    ),
    EngineSeries("step_tokens", "totals.tokens_computed", "counter", "Tokens that steps computed."),
    EngineSeries("steps_failed", "totals.steps_failed", "counter", "Steps that failed."),
    EngineSeries(
        "ttft_targets_missed",
        "totals.ttft_targets_missed",
        "counter",
        "First tokens that came later than the ttft_target of their request.",
    ),
    *_blocks_of_tier("full", ""),
    *_blocks_of_tier("store", "store_"),
    *_labelled(
        "kv_cache_swap_slots",
        "gauge",
        "Swap slots, by state: each holds one KV block of a preempted sequence.",
        "state",
        {state: f"swap_slots_{state}" for state in ("used", "free")},
    ),
    *_labelled(
        "swap_bytes",
        "counter",
        "Bytes copied to swap slots (out) and back (in).",
        "direction",
        {direction: f"totals.swap_bytes_{direction}" for direction in ("out", "in")},
    ),
    EngineSeries("swaps_failed", "totals.swaps_failed", "counter", "Swaps that failed."),
    *_labelled(
        "num_preemptions",
        "counter",
        "Preemptions of running sequences, by cause: memory (a running sequence needed the KV blocks), priority (a "
        "waiting sequence of higher priority), interactive (idle work made room).",
        "cause",
        {cause: f"totals.preemptions_for_{cause}" for cause in ("memory", "priority", "interactive")},
    ),
    EngineSeries(
        "num_preemptions_by_swap",
        "totals.preemptions_by_swap",
        "counter",
        "Preemptions by swap. The others are recomputed.",
    ),
    EngineSeries(
        "spec_decode_num_draft_tokens", "drafted_tokens", "counter", "Draft tokens that were checked."
    ),
    EngineSeries(
        "spec_decode_num_accepted_tokens", "accepted_drafts", "counter", "Draft tokens that were accepted."
    ),
    EngineSeries(
        "spec_decode_num_learned_draft_tokens",
        "totals.learned_drafts",
        "counter",
        "Draft tokens from finished answers that were checked.",
    ),
    EngineSeries(
        "spec_decode_num_learned_accepted_tokens",
        "totals.learned_drafts_accepted",
        "counter",
        "Draft tokens from finished answers that were accepted.",
    ),
    EngineSeries(
        "learned_seconds_saved",
        "totals.learned_seconds_saved",
        "gauge",
        "Estimated seconds that draft tokens from finished answers saved since the engine started.",
    ),
    EngineSeries(
        "learned_tokens", "learned_tokens", "gauge", "Tokens of finished answers that drafts are taken from."
    ),
    EngineSeries(
        "learned_bytes", "learned_bytes", "gauge", "Bytes of finished answers that drafts are taken from."
    ),
    EngineSeries(
        "kv_cache_tail_tokens",
        "two_tier.tail_tokens",
        "gauge",
        "Token capacity of the full-precision KV blocks in use.",
    ),
    EngineSeries(
        "kv_cache_store_tokens", "two_tier.store_tokens", "gauge", "Tokens in the quantised KV blocks in use."
    ),
    EngineSeries(
        "kv_cache_tail_bytes",
        "two_tier.tail_bytes",
        "gauge",
        "Bytes of the full-precision KV blocks in use.",
    ),
    EngineSeries(
        "kv_cache_store_bytes", "two_tier.store_bytes", "gauge", "Bytes of the quantised KV blocks in use."
    ),
    EngineSeries(
        "kv_cache_compression_ratio",
        "two_tier.compression_ratio",
        "gauge",
        "Bytes of a full-precision cache for the same tokens, divided by the bytes in use.",
        without_engine=1.0,
    ),
    EngineSeries("kv_cache_migrations", "two_tier.migrations", "counter", "KV blocks moved to the store."),
    EngineSeries(
        "kv_cache_migrations_shared",
        "two_tier.migrations_shared",
        "counter",
        "KV blocks moved without a copy: the store already had their content.",
    ),
)
