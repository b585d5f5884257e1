"""Makes the trace of a request: its spans with times and attributes, without prompts and answers.

A trace is made when its request ends, from the log record, the active request and the results of the engine. So it
costs nothing while the request runs. `weft.server.otlp` exports it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from weft.request import FinishReason, GenerationResult
from weft.server.admission.active_requests import ActiveRequest
from weft.server.api.formats import VECTOR_OPERATIONS, Formats
from weft.server.internal import INTERNAL
from weft.server.logs import Record
from weft.server.stream.choices import Choice

_MAX_ANSWERS = 32
"""Maximum answers with spans: the first ones of a request."""
_RESULT_SECONDS = 3.0
"""A trace waits this long for the engine to report the results of cancelled answers. Without them it has fewer spans."""
_LOOK_SECONDS = 0.1
"""Seconds between two checks for these results."""
_MAX_WAITING = 1024
"""Maximum requests that wait for such results."""
_MAX_PARENT = 128
_MAX_STATE = 4096
"""Maximum bytes of the headers `traceparent` and `tracestate`. Longer ones are ignored."""
_MAX_NAME = 200
"""Maximum characters of a model name, which a client may choose."""

Attribute = str | bool | int | float | list[str]


@dataclass(frozen=True, slots=True)
class Span:
    """Times are in seconds, on the monotonic clock."""

    name: str
    began: float
    ended: float
    attributes: dict[str, Attribute] = field(default_factory=dict)
    children: tuple[Span, ...] = ()


@dataclass(frozen=True, slots=True)
class Trace:
    root: Span
    clock_offset: float
    """Seconds since 1970 minus the monotonic clock."""
    parent: str = ""
    """The `traceparent` of the request."""
    state: str = ""
    """The `tracestate` of the request."""
    error: str = ""
    """The code of the error that ended the request."""
    is_internal: bool = False
    """The server sent the request to itself."""


@dataclass(frozen=True, slots=True, eq=False)
class _Ended:
    """An HTTP request that ended."""

    record: Record
    active: ActiveRequest | None
    scope: Mapping[str, Any]
    at: float

    @property
    def has_results(self) -> bool:
        """Whether the engine has reported the results of all its answers."""
        return self.active is None or all(one.engine_result is not None for one in self.active.choices)


class Traces:
    """Makes the traces of the requests that generate, and of those for vectors or scores. Belongs to one event loop."""

    def __init__(self, model: str, formats: Formats, export: Callable[[Trace], object]) -> None:
        self._model = model
        self._formats = formats
        self._export = export
        self._waiting: list[_Ended] = []
        self._timer: asyncio.TimerHandle | None = None

    def end(self, record: Record, active: ActiveRequest | None, scope: Mapping[str, Any]) -> None:
        """Called when a request ends. `active` is None if it was refused before it became an active request."""
        if not (record.path in self._formats or record.path in VECTOR_OPERATIONS) or record.method != "POST":
            return
        ended = _Ended(record, active, scope, time.monotonic())
        if ended.has_results or len(self._waiting) >= _MAX_WAITING:
            self._make(ended)
            return
        self._waiting.append(ended)
        if self._timer is None:
            self._look_later()

    def close(self) -> None:
        """Exports the traces that wait."""
        if self._timer is not None:
            self._timer.cancel()
        for ended in self._waiting:
            self._make(ended)
        self._waiting = []

    def _look_later(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(_LOOK_SECONDS, self._look)

    def _look(self) -> None:
        """Exports the traces whose results have arrived, or have not arrived in time."""
        waiting, self._waiting = self._waiting, []
        now = time.monotonic()
        for ended in waiting:
            if ended.has_results or now - ended.at > _RESULT_SECONDS:
                self._make(ended)
            else:
                self._waiting.append(ended)
        self._timer = None
        if self._waiting:
            self._look_later()

    def _make(self, ended: _Ended) -> None:
        record = ended.record
        model, operation = record.vector_model or "", VECTOR_OPERATIONS.get(record.path, "")
        if (answer_format := self._formats.get(record.path)) is not None:
            model, operation = self._model, answer_format.operation_name
        self._export(trace_of(record, ended.active, ended.scope, model, operation, ended.at))


def trace_of(
    record: Record,
    active: ActiveRequest | None,
    scope: Mapping[str, Any],
    model: str,
    operation_name: str,
    ended: float,
) -> Trace:
    """The trace of a request that ended at `ended` on the monotonic clock. `model` is the model that answers;
    "": not known."""
    error = ""
    if not record.is_client_gone:
        error = record.error_code or (str(record.status) if record.status >= 400 else "")
    children: tuple[Span, ...] = ()
    attributes = _request_attributes(record, scope, model, operation_name)
    if error:
        attributes["error.type"] = error
    if active is not None and active.requests:
        attributes |= _generation_attributes(active, record.is_streamed)
        children = tuple(_phases(active, ended))
    if record.num_inputs:
        attributes |= {"gen_ai.usage.input_tokens": record.prompt_tokens, "weft.inputs": record.num_inputs}
    if not error and (children or record.num_inputs):
        attributes["gen_ai.response.model"] = model
    name = f"{operation_name} {attributes.get('gen_ai.request.model', '')}".rstrip()
    headers = scope.get("headers", ())
    return Trace(
        Span(name, record.began, max(ended, record.began), attributes, children),
        time.time() - time.monotonic(),
        _header(headers, b"traceparent", _MAX_PARENT),
        _header(headers, b"tracestate", _MAX_STATE),
        error,
        INTERNAL in scope,
    )


def _header(headers: Collection[tuple[bytes, bytes]], name: bytes, max_length: int) -> str:
    value = b",".join(value for key, value in headers if key == name)
    return value.decode("latin-1") if len(value) <= max_length else ""


def _request_attributes(
    record: Record, scope: Mapping[str, Any], model: str, operation_name: str
) -> dict[str, Attribute]:
    """Attributes that every request has."""
    attributes: dict[str, Attribute] = {
        "gen_ai.operation.name": operation_name,
        "gen_ai.provider.name": "weft",
        "http.request.method": record.method,
        "http.route": record.path,
        "weft.request_id": record.request_id,
    }
    if requested := (record.model or model)[:_MAX_NAME]:
        attributes["gen_ai.request.model"] = requested
    if record.status:
        attributes["http.response.status_code"] = record.status
    if record.key_name is not None:
        attributes["weft.key"] = record.key_name
    if record.is_client_gone:
        attributes["weft.client_gone"] = True
    if (address := scope.get("server")) is not None:
        attributes["server.address"] = address[0]
        if address[1] is not None:
            attributes["server.port"] = address[1]
    return attributes


def _generation_attributes(active: ActiveRequest, is_streamed: bool) -> dict[str, Attribute]:
    request = active.requests[0]
    params = request.params
    results = [result for one in active.choices if (result := one.engine_result) is not None]
    is_json = params.grammar is not None and params.grammar.kind == "json_schema"
    # Listed, and not made from `PARAMETERS`: OpenTelemetry defines which parameters have an attribute.
    found: dict[str, Attribute | None] = {
        "gen_ai.response.id": active.id,
        "gen_ai.conversation.id": request.session_id,
        "gen_ai.output.type": "json" if is_json else "text",
        "gen_ai.request.stream": is_streamed,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.top_k": params.top_k if params.top_k > 0 else None,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.seed": params.seed,
        "gen_ai.request.frequency_penalty": params.frequency_penalty or None,
        "gen_ai.request.presence_penalty": params.presence_penalty or None,
        "gen_ai.request.choice.count": params.n if params.n > 1 else None,
        "gen_ai.usage.input_tokens": active.prompt_tokens,
        "gen_ai.usage.output_tokens": active.choices.num_tokens,
        "gen_ai.usage.cache_read.input_tokens": sum(one.cached_token_count for one in results[:: params.n]),
        "gen_ai.usage.reasoning.output_tokens": active.choices.num_reasoning_tokens or None,
        "gen_ai.response.finish_reasons": [
            _finish_reason(one, result) for one in active.choices if (result := one.engine_result) is not None
        ],
        "weft.priority": request.priority.name.lower(),
        "weft.preemptions": sum(one.preemptions for one in results),
        "weft.idle_work": active.is_idle_work or None,
    }
    if is_streamed and results:
        found["gen_ai.response.time_to_first_chunk"] = results[0].time_to_first_token
    return {name: value for name, value in found.items() if value is not None}


def _finish_reason(choice: Choice, result: GenerationResult) -> str:
    """The finish reason as the OpenAI API names it. That API has no name for a cancelled answer: weft's name is used."""
    if choice.has_calls and result.finish_reason.in_openai == "stop":
        return "tool_calls"
    is_cancelled = result.finish_reason is FinishReason.CANCELLED
    return result.finish_reason.value if is_cancelled else result.finish_reason.in_openai


def _phases(active: ActiveRequest, ended: float) -> Iterator[Span]:
    """The spans from the end of the body on: prepare, then queue, prefill and decode of each answer."""
    queued_at = active.queued_at
    if queued_at is None:
        yield Span("prepare", active.began, ended)
        return
    yield Span("prepare", active.began, queued_at)
    answers = list(active.choices)
    for answer in answers[:_MAX_ANSWERS]:
        attributes: dict[str, Attribute] = {"weft.answer": answer.index} if len(answers) > 1 else {}
        if (result := answer.engine_result) is not None:
            yield from _phases_of_answer(result, queued_at, attributes)
        if answer.has_calls:
            yield Span("parse_tools", answer.calls_began, answer.calls_ended or ended, attributes)


def _phases_of_answer(
    result: GenerationResult, queued_at: float, attributes: dict[str, Attribute]
) -> Iterator[Span]:
    """The spans of an answer: queue until the first admission, prefill until the first token, decode until the end.
    Preemptions are children of the phase in which they began."""
    preempted = result.preempted_times
    # `waiting_time` has the seconds of preemptions too.
    admitted = result.waiting_time - sum(one.ended - one.began for one in preempted)
    end, first = result.total_time, result.time_to_first_token

    def span(name: str, began: float, ended: float, children: tuple[Span, ...] = ()) -> Span:
        return Span(name, queued_at + began, queued_at + ended, attributes, children)

    pauses = [(one, span("swap" if one.by_swap else "recompute", one.began, one.ended)) for one in preempted]
    yield span("queue", 0.0, admitted)
    if admitted >= end:
        return  # it was never admitted
    prefill_end = end if first is None else first
    of_prefill = tuple(pause for one, pause in pauses if one.began < prefill_end)
    yield span("prefill", admitted, prefill_end, of_prefill)
    if prefill_end < end:
        yield span(
            "decode", prefill_end, end, tuple(pause for one, pause in pauses if one.began >= prefill_end)
        )
