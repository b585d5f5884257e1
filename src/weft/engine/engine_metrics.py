"""Metrics of an engine: latency histograms, request counts, token rate."""

from __future__ import annotations

import dataclasses

from weft.metrics import Histogram, RecentRate, ServingMetrics
from weft.request import FinishReason, GenerationResult, RequestState
from weft.scheduling.scheduler import ContinuousBatchScheduler
from weft.scheduling.views import slots


class EngineMetrics:
    """Owns the histograms and counters. Callers hold the engine's lock."""

    def __init__(self, scheduler: ContinuousBatchScheduler, now: float) -> None:
        self.ended = dict.fromkeys((RequestState.COMPLETED, RequestState.FAILED, RequestState.CANCELLED), 0)
        self._scheduler = scheduler
        self._started_at = now
        self._latency, self._first_token = Histogram(), Histogram()
        self._between_tokens, self._waiting = Histogram(), Histogram()
        self._token_rate = RecentRate(now)
        self._tokens_counted = 0

    def record(self, results: list[GenerationResult], now: float) -> None:
        """Records the tokens of a step and the results of the requests that it ended."""
        scheduler = self._scheduler
        generated = scheduler.stats.tokens_generated
        self._token_rate.record(now, generated - self._tokens_counted)
        self._tokens_counted = generated
        tokens = scheduler.tokens
        gaps, tokens.token_gaps = tokens.token_gaps, {}
        for gap, times in gaps.items():
            self._between_tokens.record(gap, times)
        first_token_times, tokens.first_token_times = tokens.first_token_times, []
        for seconds in first_token_times:
            self._first_token.record(seconds)
        for result in results:
            self.ended[result.state] += 1
            self._waiting.record(result.waiting_time)
            if result.finish_reason not in (FinishReason.CANCELLED, FinishReason.ERROR):
                self._latency.record(result.total_time)

    def bucket_counts(self) -> tuple[dict[int, int], dict[int, int]]:
        """Counts by bucket of the times to the first token, and of the gaps between tokens."""
        return _counts(self._first_token), _counts(self._between_tokens)

    def metrics(self, now: float) -> ServingMetrics:
        scheduler = self._scheduler
        uptime = max(now - self._started_at, 1e-9)
        queues = (scheduler.queue, scheduler.idle_queue)
        preempted = sum(queue.num_preempted for queue in queues)
        kv_cache = scheduler.kv_cache
        cache = kv_cache.stats()
        has_store = kv_cache.store.num_blocks > 0
        swap_slots_used = cache.swap_blocks_used + cache.store_swap_blocks_used
        return ServingMetrics(
            uptime=uptime,
            requests_pending=sum(map(len, queues)) - preempted,
            requests_running=len(scheduler.running) + len(scheduler.paused),
            requests_preempted=preempted + len(scheduler.resuming),
            requests_completed=self.ended[RequestState.COMPLETED],
            requests_failed=self.ended[RequestState.FAILED],
            requests_cancelled=self.ended[RequestState.CANCELLED],
            totals=dataclasses.replace(scheduler.stats),
            requests_per_second=sum(self.ended.values()) / uptime,
            tokens_per_second=self._token_rate.per_second(now),
            latency=self._latency.summary(),
            time_to_first_token=self._first_token.summary(),
            inter_token_latency=self._between_tokens.summary(),
            waiting_time=self._waiting.summary(),
            batch_utilisation=cache.rows_used / cache.rows,
            cache_utilisation=cache.utilisation,
            slots=slots(scheduler, now),
            step_seconds=scheduler.step_seconds.copy(),
            blocks=kv_cache.pool.num_by_state(),
            evictions=kv_cache.pool.evictions.copy(),
            swap_slots_used=swap_slots_used,
            swap_slots_free=scheduler.info.swap_blocks + scheduler.info.store_swap_blocks - swap_slots_used,
            two_tier=kv_cache.two_tier(),
            store_blocks=kv_cache.store.num_by_state() if has_store else None,
            store_evictions=kv_cache.store.evictions.copy() if has_store else None,
            learned_tokens=scheduler.speculation.answers.num_tokens,
            learned_bytes=scheduler.speculation.answers.num_bytes,
        )


def _counts(histogram: Histogram) -> dict[int, int]:
    return {bucket: count for bucket, count in enumerate(histogram.counts) if count}
