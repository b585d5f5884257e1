"""Metrics for Prometheus. They have vLLM's names with the prefix `weft:`."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from weft.engine.ipc.client import EngineClient
from weft.errors import WeftError
from weft.metrics import ENGINE_SERIES, STEP_SECONDS, Buckets, EngineSeries
from weft.request import GenerationResult, Priority
from weft.server.admission.keys import ApiKey

if TYPE_CHECKING:
    from weft.server.learned.answers import AnswerKeeper

CONTENT_TYPE = CONTENT_TYPE_LATEST

M = TypeVar("M", Gauge, Counter, Histogram)

_TOKEN_SECONDS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
)
_FIRST_TOKEN_SECONDS = (*_TOKEN_SECONDS, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0)
_LAG_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 5.0)
_REQUEST_SECONDS = (0.005, 0.02, 0.05, 0.1, 0.3, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0)


class _Histograms(Collector):
    """One histogram, with a series for each combination of labels. It is fast enough to record a value for every event of
    every stream. The Histogram of prometheus_client would take a fifth of the time of an event."""

    def __init__(self, name: str, help: str, labels: Sequence[str]) -> None:
        self._name, self._help, self._labels = name, help, labels
        self._series: dict[tuple[str, ...], Buckets] = {}

    def add(self, values: tuple[str, ...], bounds: tuple[float, ...]) -> Buckets:
        """A new series with these values of the labels."""
        buckets = self._series[values] = Buckets.of(bounds)
        return buckets

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._name, self._help, labels=self._labels)
        for values, buckets in self._series.items():
            names = [*map(str, buckets.bounds), "+Inf"]
            cumulative = itertools.accumulate(buckets.counts)
            family.add_metric(values, list(zip(names, cumulative, strict=True)), buckets.total)
        yield family


class TokenTimes(NamedTuple):
    """The times of tokens of one priority."""

    first_tokens: Buckets
    gaps: Buckets

    def first_token(self, seconds: float) -> None:
        self.first_tokens.record(seconds)

    def delivery(self, seconds: float, num_tokens: int) -> None:
        """Records an event with `num_tokens` tokens, `seconds` after the previous event of its stream."""
        self.gaps.record(seconds / num_tokens)


class ServerMetrics:
    """Counts requests and tokens. The engine's own metrics are fetched on each scrape."""

    def __init__(self, model: str, *, is_two_tier: bool = False) -> None:
        """`is_two_tier`: also export the metrics of a two-tier KV cache."""
        self._model, self._labels = model, {"model_name": model}
        self._registry = CollectorRegistry(auto_describe=True)
        self._add_engines(is_two_tier)
        self._add_http()
        self._add_tokens()
        self._add_times()
        self._add_results()
        self._add_batches()
        self._add_feedback()
        self._used: dict[str, tuple[int, int]] = {}
        """Requests and tokens by key name. Only configured keys get an entry, so a client cannot add entries."""

    def _family(self, kind: type[M], name: str, help: str, **options: Any) -> M:
        """A metric of which each model may have a series. The series of MODEL is exported from the start."""
        family = kind(f"weft:{name}", help, self._labels, registry=self._registry, **options)
        family.labels(**self._labels)
        return family

    def _own(self, kind: type[M], name: str, help: str, **options: Any) -> M:
        """A metric that only MODEL has."""
        return self._family(kind, name, help, **options).labels(**self._labels)

    def _by_label(self, name: str, help: str, label: str) -> Counter:
        return Counter(f"weft:{name}", help, [*self._labels, label], registry=self._registry)

    def _add_engines(self, is_two_tier: bool) -> None:
        self._processes = _ProcessFamilies(
            self._family(
                Gauge,
                "num_requests_waiting",
                "Answers that wait to be admitted, preempted and held ones included.",
            ),
            self._family(Gauge, "engine_up", "1 while the engine process is ready and responds, else 0."),
            self._family(Counter, "engine_restarts", "Restarts of the engine process."),
            self._family(Counter, "engine_stalls", "Restarts of the engine process because it was stuck."),
        )
        self._series: dict[str, Any] = {}
        """The metrics of `ENGINE_SERIES` by name."""
        self._of_engine = self._engine_metrics(self._model, is_two_tier)
        self._of_vectors: dict[str, _EngineMetrics] = {}
        """Model -> the metrics of its engine, for the models besides MODEL."""

    def _add_http(self) -> None:
        self._lost_traces = _MirroredCounter(
            self._own(Counter, "traces_lost", "Traces that the collector did not accept, or not fast enough.")
        )
        self._coalesced_requests = _MirroredCounter(
            self._own(Counter, "requests_coalesced", "Requests that joined an identical one in flight.")
        )
        self._coalesced_tokens = _MirroredCounter(
            self._own(
                Counter,
                "tokens_coalesced",
                "Tokens that such requests got without a computation of their own.",
            )
        )
        self.count_lost_traces: Callable[[], int] = lambda: 0
        self._own(Gauge, "start_time_seconds", "When the server started, in seconds since 1970.").set(
            time.time()
        )
        self.open_requests = self._own(Gauge, "http_requests_open", "HTTP requests that are not yet ended.")
        self._held = self._own(
            Gauge, "num_requests_held", "Answers held back in the server for fairness between keys."
        )
        self.count_held: Callable[[], int] = lambda: 0
        lag = _Histograms(
            "weft:event_loop_lag_seconds",
            "Lag of the server's event loop in seconds, without the run delay of its thread.",
            list(self._labels),
        )
        self._registry.register(lag)
        self.loop_lag = lag.add((self._model,), _LAG_SECONDS)

    def _add_tokens(self) -> None:
        self._vector_inputs = self._family(
            Counter, "vector_inputs", "Texts and pairs of completed requests for vectors or scores."
        )
        self._prompt_tokens = self._family(Counter, "prompt_tokens", "Prompt tokens of completed requests.")
        self._cached_tokens = self._own(
            Counter, "prefix_cache_hits", "Prompt tokens of completed requests that were prefix hits."
        )
        self._generated_tokens = self._own(Counter, "generation_tokens", "Generated tokens.")
        labels = [*self._labels, "priority"]
        first_tokens = _Histograms(
            "weft:time_to_first_token_seconds",
            "Seconds from the complete request to its first token, by priority.",
            labels,
        )
        gaps = _Histograms(
            "weft:inter_token_latency_seconds",
            "Seconds since the previous event of the stream, per token of this event, by priority.",
            labels,
        )
        self._registry.register(first_tokens)
        self._registry.register(gaps)
        self._token_times = {
            priority: TokenTimes(
                first_tokens.add((self._model, priority.name.lower()), _FIRST_TOKEN_SECONDS),
                gaps.add((self._model, priority.name.lower()), _TOKEN_SECONDS),
            )
            for priority in Priority
        }

    def _add_times(self) -> None:
        buckets = _REQUEST_SECONDS
        self._per_token = self._own(
            Histogram,
            "time_per_output_token_seconds",
            "Mean seconds between two tokens of an answer.",
            buckets=_TOKEN_SECONDS,
        )
        self._latency = self._family(
            Histogram,
            "e2e_request_latency_seconds",
            "Seconds from the complete request to its last token.",
            buckets=buckets,
        )
        self._queue = self._own(
            Histogram,
            "request_queue_time_seconds",
            "Seconds until the request was admitted.",
            buckets=buckets,
        )
        self._prefill = self._own(
            Histogram,
            "request_prefill_time_seconds",
            "Seconds from admission to the first token.",
            buckets=buckets,
        )
        self._decode = self._own(
            Histogram,
            "request_decode_time_seconds",
            "Seconds from the first token to the last.",
            buckets=buckets,
        )

    def _add_results(self) -> None:
        self._success = self._by_label(
            "request_success", "Completed answers, by finish reason.", "finished_reason"
        )
        self._failed = self._by_label(
            "request_failure", "Requests that ended with an error, by HTTP status.", "status"
        )

    def _add_batches(self) -> None:
        self.batches_running = self._own(
            Gauge, "batches_running", "Running batches: at most one for each API key."
        )
        self.batch_lines_running = self._own(Gauge, "batch_lines_running", "Lines of batches in flight.")
        self._batch_lines = self._by_label(
            "batch_lines",
            "Lines of batches that have a result, by outcome: completed, failed.",
            "outcome",
        )

    def _add_feedback(self) -> None:
        self.feedback: AnswerKeeper | None = None
        by_score = self._by_label(
            "feedback", "Feedback of clients, by score: positive, negative, neutral.", "score"
        )
        self._feedback = {
            score: _MirroredCounter(by_score.labels(**self._labels, score=score))
            for score in ("positive", "negative", "neutral")
        }
        self._kept_responses = self._own(
            Gauge, "kept_responses", "Responses that are kept so that clients can send feedback."
        )
        self._feedback_bytes = self._own(Gauge, "feedback_bytes", "Bytes of kept responses and feedback.")
        self._lost_responses = _MirroredCounter(
            self._own(
                Counter, "responses_not_kept", "Responses that were not kept: too large, or no room for them."
            )
        )

    def _update_feedback(self, answers: AnswerKeeper) -> None:
        for score, counter in self._feedback.items():
            counter.set(answers.num_given[score])
        self._kept_responses.set(answers.totals.requests)
        self._feedback_bytes.set(answers.totals.num_bytes)
        self._lost_responses.set(answers.memory.num_lost)

    def _engine_metrics(self, model: str, is_two_tier: bool = False) -> _EngineMetrics:
        series = [
            (one, self._exporting_metric(one, model))
            for one in ENGINE_SERIES
            if is_two_tier or not one.is_two_tier
        ]
        return _EngineMetrics(self._processes, model, series)

    def _exporting_metric(self, series: EngineSeries, model: str) -> _ExportingMetric:
        """Returns the metric that exports `series` for the engine of `model`. Its name is registered at the first call."""
        name, registry, families = f"weft:{series.name}", self._registry, self._series
        labels = {"model_name": model, **dict(series.labels)}
        if series.name not in families:
            if series.kind == "histogram":
                families[series.name] = _Histograms(name, series.help, list(labels))
                registry.register(families[series.name])
            else:
                kind = Gauge if series.kind == "gauge" else Counter
                families[series.name] = kind(name, series.help, list(labels), registry=registry)
        family = families[series.name]
        if series.kind == "histogram":
            return _MirroredBuckets(family.add(tuple(labels.values()), STEP_SECONDS))
        metric = family.labels(**labels)
        return metric if series.kind == "gauge" else _MirroredCounter(metric)

    def token_times(self, priority: Priority) -> TokenTimes:
        return self._token_times[priority]

    def answered(self, results: Sequence[GenerationResult], prompts: int, seconds: float | None) -> None:
        """Records a completed request; `prompts` is its number of prompts. `seconds` is None for idle work: it can be
        paused, so its times do not describe what clients see."""
        per_prompt = len(results) // prompts
        prompt_tokens = self._prompt_tokens.labels(**self._labels)
        for index, result in enumerate(results):
            if index % per_prompt == 0:
                prompt_tokens.inc(result.prompt_token_count)
                self._cached_tokens.inc(result.cached_token_count)
            self._success.labels(**self._labels, finished_reason=result.finish_reason.in_openai).inc()
            if seconds is None:
                continue
            self._queue.observe(result.waiting_time)
            self._prefill.observe(result.prefill_time)
            self._decode.observe(result.decode_time)
            if result.completion_token_count > 1:
                self._per_token.observe(result.decode_time / (result.completion_token_count - 1))
        if seconds is not None:
            self._latency.labels(**self._labels).observe(seconds)

    def vectors(self, model: str, num_inputs: int, num_tokens: int, seconds: float) -> None:
        """Records a completed request for vectors or scores."""
        self._vector_inputs.labels(model).inc(num_inputs)
        self._prompt_tokens.labels(model).inc(num_tokens)
        self._latency.labels(model).observe(seconds)

    def generated(self, num_tokens: int) -> None:
        """Records the generated tokens of a request that ended, whether they were sent to the client or not."""
        self._generated_tokens.inc(num_tokens)

    def batch_lines(self, completed: int, failed: int) -> None:
        """Records results of batch lines when they are saved."""
        for outcome, count in (("completed", completed), ("failed", failed)):
            self._batch_lines.labels(**self._labels, outcome=outcome).inc(count)

    def failed(self, status: int) -> None:
        self._failed.labels(**self._labels, status=str(status)).inc()

    def used(self, key: str, num_tokens: int) -> None:
        """Records a request that ended, and its tokens, for its API key."""
        requests, tokens = self._used.get(key, (0, 0))
        self._used[key] = (requests + 1, tokens + num_tokens)

    async def text(
        self,
        engine: EngineClient,
        key: ApiKey | None = None,
        vector_engines: Mapping[str, EngineClient] = MappingProxyType({}),
    ) -> bytes:
        """The exposition for `key`. Only a key with admin = true sees the usage of other keys. `vector_engines` are the
        other engines, by the names of their models."""
        self._lost_traces.set(self.count_lost_traces())
        self._coalesced_requests.set(engine.shared_answers.num_requests)
        self._coalesced_tokens.set(engine.shared_answers.num_tokens)
        if self.feedback is not None:
            self._update_feedback(self.feedback)
        num_held = self.count_held()
        self._held.set(num_held)
        for name in vector_engines:
            if name not in self._of_vectors:
                self._of_vectors[name] = self._engine_metrics(name)
        await asyncio.gather(
            self._of_engine.update(engine, num_held),
            *(self._of_vectors[name].update(each, 0) for name, each in vector_engines.items()),
        )
        is_operator = key is not None and key.admin
        used = {name: one for name, one in self._used.items() if is_operator or (key and name == key.name)}
        return generate_latest(self._registry) + generate_latest(_KeyUsage(self._labels, used))


class _KeyUsage(Collector):
    """Exports the requests and tokens of some keys."""

    def __init__(self, labels: Mapping[str, str], used: Mapping[str, tuple[int, int]]) -> None:
        self._labels, self._used = labels, used

    def collect(self) -> Iterator[CounterMetricFamily]:
        helps = (
            ("key_requests", "Requests, by API key."),
            ("key_tokens", "Prompt and generated tokens, by API key."),
        )
        for index, (name, help) in enumerate(helps):
            family = CounterMetricFamily(f"weft:{name}", help, labels=[*self._labels, "key"])
            for key, counts in self._used.items():
                family.add_metric([*self._labels.values(), key], counts[index])
            yield family


class _ProcessFamilies(NamedTuple):
    """The metrics of engine processes. Each model has a series of them."""

    waiting: Gauge
    up: Gauge
    restarts: Counter
    stalls: Counter


class _EngineMetrics:
    """The metrics of one engine process."""

    def __init__(
        self, processes: _ProcessFamilies, model: str, series: Sequence[tuple[EngineSeries, _ExportingMetric]]
    ) -> None:
        self._restarts = _MirroredCounter(processes.restarts.labels(model))
        self._stalls = _MirroredCounter(processes.stalls.labels(model))
        self._up, self._waiting = processes.up.labels(model), processes.waiting.labels(model)
        self._series = series

    async def update(self, engine: EngineClient, num_held: int) -> None:
        """Fetches the figures of the engine. While it is down, gauges show that, and the other series keep their values."""
        self._restarts.set(engine.restarts)
        self._stalls.set(engine.stalls)
        try:
            figures = await engine.metrics()
        except WeftError:
            self._up.set(0)
            self._waiting.set(num_held)
            for series, metric in self._series:
                if isinstance(metric, Gauge):
                    metric.set(series.without_engine)
        else:
            self._up.set(1)
            self._waiting.set(figures.requests_pending + figures.requests_preempted + num_held)
            for series, metric in self._series:
                if not series.is_two_tier or figures.two_tier is not None:
                    metric.set(attrgetter(series.figure)(figures))


class _MirroredCounter:
    """A counter that follows a total that another object counts. If the total starts again at 0, as after a restart of
    the engine process, the counter keeps its value."""

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self._seen = 0.0

    def set(self, total: float) -> None:
        self._counter.inc(total - self._seen if total >= self._seen else total)
        self._seen = total


class _MirroredBuckets:
    """A histogram that follows a histogram of the engine process. It keeps its counts when the process restarts."""

    def __init__(self, buckets: Buckets) -> None:
        self._buckets = buckets
        self._seen = Buckets.of(buckets.bounds)

    def set(self, buckets: Buckets) -> None:
        is_new = sum(buckets.counts) < sum(self._seen.counts)
        seen = Buckets.of(buckets.bounds) if is_new else self._seen
        ours = self._buckets
        ours.counts = [a + b - c for a, b, c in zip(ours.counts, buckets.counts, seen.counts, strict=True)]
        ours.total += buckets.total - seen.total
        self._seen = buckets


_ExportingMetric = Gauge | _MirroredCounter | _MirroredBuckets
"""The metric that exports a series of an engine."""
