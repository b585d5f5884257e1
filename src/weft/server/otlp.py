"""Exports traces over OTLP (HTTP, protobuf), in a thread of its own. The only module that imports opentelemetry.

The queue is bounded. A collector that is slow or gone costs traces, never requests: `num_lost` counts them.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from weft import __version__
from weft.errors import InvalidRequestError, WeftError
from weft.server.traces import Span, Trace

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PATH = "/v1/traces"
_MAX_TRACES = 2048
"""Maximum traces that wait for the export."""
_MAX_BATCH = 256
"""Maximum traces in one export."""
_BATCH_SECONDS = 1.0
"""After the first trace of a batch, other traces join it for this many seconds. OTEL_BSP_SCHEDULE_DELAY overrides the
value, in milliseconds."""
_CLOSE_SECONDS = 5.0


def open_exporter(
    endpoint: str | None, log: Callable[..., object], environment: Mapping[str, str] = os.environ
) -> OtlpExporter | None:
    """The exporter, if `endpoint` or a standard variable of OpenTelemetry names a collector; else None. If a package is
    missing, raises for a collector that `endpoint` names, and only warns for one that a variable names."""
    is_on = environment.get("OTEL_TRACES_EXPORTER", "otlp") != "none"
    is_on = is_on and environment.get("OTEL_SDK_DISABLED", "").lower() != "true"
    if not is_on or not (endpoint or any(environment.get(name) for name in _ENDPOINTS)):
        return None
    if endpoint is not None:
        if not endpoint.startswith(("http://", "https://")):
            raise InvalidRequestError(
                f"otlp_endpoint is {endpoint!r:.200}; allowed: a URL such as http://127.0.0.1:4318",
                field="otlp_endpoint",
            )
        endpoint = endpoint.rstrip("/").removesuffix(_PATH) + _PATH
    try:
        return OtlpExporter(endpoint, log, _batch_seconds(environment))
    except ImportError as error:
        message = f"traces need the packages of OpenTelemetry ({error}): pip install 'weft[otel]'"
        if endpoint is not None:
            raise WeftError(message) from error
        log("warning", f"There are no traces: {message}.", "warning")
        return None


def _batch_seconds(environment: Mapping[str, str]) -> float:
    given = environment.get("OTEL_BSP_SCHEDULE_DELAY", "")
    return int(given) / 1000 if given.isdecimal() else _BATCH_SECONDS


class OtlpExporter:
    """Owns the queue and the thread. `put` may be called from any thread."""

    def __init__(
        self, endpoint: str | None, log: Callable[..., object], batch_seconds: float = _BATCH_SECONDS
    ) -> None:
        """`endpoint`: the whole URL. None: the URL from OpenTelemetry's environment variables."""
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        self.num_lost = 0
        """Traces that were not exported."""
        self._log = log
        self._batch_seconds = batch_seconds
        self._exporter = OTLPSpanExporter(endpoint=endpoint)
        self._make = _SpanMaker()
        self._queue: queue.Queue[Trace | None] = queue.Queue(_MAX_TRACES)
        self._is_failing = False
        self._thread = threading.Thread(target=self._run, name="weft-otlp", daemon=True)
        self._thread.start()

    def put(self, trace: Trace) -> None:
        try:
            self._queue.put_nowait(trace)
        except queue.Full:
            self.num_lost += 1

    def close(self) -> None:
        """Exports what is in the queue, unless the collector is too slow."""
        give_up_at = time.monotonic() + _CLOSE_SECONDS
        with suppress(queue.Full):
            self._queue.put(None, timeout=_CLOSE_SECONDS)
        self._thread.join(max(0.0, give_up_at - time.monotonic()))
        self._exporter.shutdown()  # ends the pauses between retries

    def _run(self) -> None:
        is_over = False
        while not is_over:
            batch: list[Trace] = []
            for trace in self._next_batch():
                if trace is None:
                    is_over = True
                else:
                    batch.append(trace)
            if batch:
                self._send(batch)

    def _next_batch(self) -> Iterator[Trace | None]:
        """The next traces. None: the exporter closes."""
        trace = self._queue.get()
        until, count = time.monotonic() + self._batch_seconds, 1
        yield trace
        while trace is not None and count < _MAX_BATCH:
            try:
                trace = self._queue.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                return
            yield trace
            count += 1

    def _send(self, batch: list[Trace]) -> None:
        """Exports a batch of traces. Counts them as lost if the collector does not accept them."""
        from opentelemetry.sdk.trace.export import SpanExportResult

        try:
            spans = [span for trace in batch for span in self._make(trace)]
            is_sent = not spans or self._exporter.export(spans) is SpanExportResult.SUCCESS
        except Exception:  # a mistake here must not end the thread
            is_sent = False
        if not is_sent:
            self.num_lost += len(batch)
        # Logs only the first success after failures, and the first failure after successes.
        if is_sent is self._is_failing:
            self._is_failing = not is_sent
            message = "Traces are exported again." if is_sent else "The collector does not accept traces."
            level = "info" if is_sent else "warning"
            self._log("traces_exported" if is_sent else "traces_lost", message, level, lost=self.num_lost)


class _SpanMaker:
    """Makes spans of the SDK, which applies the sampler, the limits and the resource of the standard variables."""

    def __init__(self) -> None:
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        made: list[ReadableSpan] = []

        class Collecting(SpanProcessor):
            def on_end(self, span: ReadableSpan) -> None:
                made.append(span)

        own = {"service.name": "weft", "service.version": __version__}
        resource = Resource.create(own | dict(OTELResourceDetector().detect().attributes))
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        provider.add_span_processor(Collecting())
        self._made = made
        self._tracer = provider.get_tracer("weft", __version__)
        self._propagator = TraceContextTextMapPropagator()

    def __call__(self, trace: Trace) -> list[Any]:
        """The spans of a trace that the sampler accepts."""
        from opentelemetry.context import Context
        from opentelemetry.trace import SpanKind

        headers = {"traceparent": trace.parent, "tracestate": trace.state}
        parent = self._propagator.extract({name: one for name, one in headers.items() if one}, Context())
        self._add(trace.root, parent, trace, SpanKind.INTERNAL if trace.is_internal else SpanKind.SERVER)
        made = self._made.copy()
        self._made.clear()
        return made

    def _add(self, span: Span, parent: Any, trace: Trace, kind: Any) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        def nanoseconds(at: float) -> int:
            return int((at + trace.clock_offset) * 1e9)

        made = self._tracer.start_span(
            span.name, parent, kind, span.attributes, start_time=nanoseconds(span.began)
        )
        if not made.is_recording():
            return
        for child in span.children:
            self._add(child, set_span_in_context(made, parent), trace, SpanKind.INTERNAL)
        if span is trace.root and trace.error:
            made.set_status(Status(StatusCode.ERROR, trace.error))
        made.end(nanoseconds(span.ended))
