"""The server's log on standard error: one line for each request that ended, and one for each event such as a restart.

It never contains a prompt, an answer or an API key. A thread formats and writes the lines, so that a slow reader of the
log cannot block the event loop. Lines that do not fit the queue are dropped, and a line reports their number.
"""

from __future__ import annotations

import logging
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TextIO

import msgspec

from weft.request import GenerationResult, RequestId
from weft.server.settings import LogFormat

if TYPE_CHECKING:
    from weft.server.admission.active_requests import ActiveRequest

_MAX_LINES = 8192
_FLUSH_SECONDS = 2.0
QUIET_PATHS = frozenset({"/health", "/ready", "/metrics"})
"""Routes that probes call every few seconds. They are logged only when they fail."""


@dataclass
class Record:
    """The log record of one HTTP request. Middleware and route handlers fill it in."""

    method: str
    path: str
    id: RequestId
    """The id of the request in the engine, in the response and in /admin/requests."""
    given_id: str | None = None
    """The id in the client's X-Request-Id header."""
    began: float = field(default_factory=time.monotonic)
    status: int = 0
    key_name: str | None = None
    error_code: str | None = None
    is_streamed: bool = False
    is_client_gone: bool = False
    results: Sequence[GenerationResult] = ()
    num_choices_per_prompt: int = 1
    model: str | None = None
    """The model name in the request."""
    vector_model: str | None = None
    """The model that makes the vectors or scores of the request."""
    active: ActiveRequest | None = None
    """The active request. `Traces` needs its times."""
    num_inputs: int = 0
    """Texts or pairs of a request for vectors or scores."""
    prompt_tokens: int = 0
    """Tokens of these texts or pairs."""

    @property
    def request_id(self) -> str:
        """The value of the X-Request-Id header in the response."""
        return self.given_id or self.id

    def fields(self, seconds: float) -> dict[str, Any]:
        """The fields of the log line. Unknown and false values are left out."""
        known: dict[str, Any] = {
            "request_id": self.request_id,
            "id": None if self.given_id is None else self.id,
            "key": self.key_name,
            "method": self.method,
            "route": self.path,
            "status": self.status or None,
            "error_code": self.error_code,
            "stream": self.is_streamed or None,
            "client_gone": self.is_client_gone or None,
            "inputs": self.num_inputs or None,
            "prompt_tokens": self.prompt_tokens or None,
        }
        if self.results:
            prompts = self.results[:: self.num_choices_per_prompt]
            first = self.results[0]
            known |= {
                "prompt_tokens": sum(one.prompt_token_count for one in prompts),
                "cached_tokens": sum(one.cached_token_count for one in prompts),
                "completion_tokens": sum(one.completion_token_count for one in self.results),
                "finish_reasons": [one.finish_reason.in_openai for one in self.results],
                "queue_seconds": _rounded(first.waiting_time),
                "first_token_seconds": _rounded(first.time_to_first_token),
            }
        known["total_seconds"] = _rounded(seconds)
        return {name: value for name, value in known.items() if value is not None}


record_of_task: ContextVar[Record | None] = ContextVar("record_of_task", default=None)
"""The record of the request that the current task handles."""


def current_record() -> Record:
    """The record of the current request. Outside of a request, a new record that is never logged."""
    return record_of_task.get() or Record("", "", RequestId(""))


class ServerLog:
    """Owns the thread that writes the log. `close` waits until the remaining lines are written."""

    def __init__(self, log_format: LogFormat, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        if log_format == "auto":
            log_format = "text" if self._stream.isatty() else "json"
        self.format = log_format
        self._num_lost = 0
        self._lines: queue.Queue[Callable[[], str] | None] = queue.Queue(_MAX_LINES)
        self._writer = threading.Thread(target=self._write, name="weft-log", daemon=True)
        if log_format != "off":
            self._writer.start()

    def event(self, name: str, message: str, level: str = "info", **fields: Any) -> None:
        """Logs an event: `message` for people, `fields` for programs."""
        now = time.time()

        def line() -> str:
            sentence = "\n".join([message, *([fields["traceback"]] if "traceback" in fields else [])])
            return self._line(now, level, name, {"message": message, **fields}, sentence)

        self._put(line)

    def request(self, record: Record) -> None:
        """Logs a request that ended."""
        if record.path in QUIET_PATHS and record.status < 400:
            return
        now, seconds = time.time(), time.monotonic() - record.began
        level = "error" if record.status >= 500 else "info"

        def line() -> str:
            fields = record.fields(seconds)
            return self._line(now, level, "request", fields, _sentence(fields))

        self._put(line)

    def close(self) -> None:
        if self._writer.is_alive():
            give_up_at = time.monotonic() + _FLUSH_SECONDS
            # If the reader of standard error is stuck, the queue stays full.
            with suppress(queue.Full):
                self._lines.put(None, timeout=_FLUSH_SECONDS)
                self._writer.join(max(0.0, give_up_at - time.monotonic()))

    def _put(self, line: Callable[[], str]) -> None:
        if self.format == "off":
            return
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self._num_lost += 1

    def _line(self, now: float, level: str, name: str, fields: Mapping[str, Any], sentence: str) -> str:
        at = datetime.fromtimestamp(now, UTC)
        if self.format == "text":
            return f"{at.astimezone():%H:%M:%S} {sentence}\n"
        stamp = at.isoformat(timespec="milliseconds").replace("+00:00", "Z")
        return msgspec.json.encode({"time": stamp, "level": level, "event": name, **fields}).decode() + "\n"

    def _write(self) -> None:
        """Runs in the writer thread."""
        while (line := self._lines.get()) is not None:
            # The stream may be closed, the disk full, or no memory left. The server continues without this line.
            with suppress(Exception):
                self._stream.write(self._text(line))
                if self._num_lost:
                    self._stream.write(self._lost_line())
                self._stream.flush()

    def _text(self, line: Callable[[], str]) -> str:
        """Returns the line. If making it fails, returns a line with the type of the error only: the error's message may
        quote a request."""
        try:
            return line()
        except Exception as error:
            message = f"a log line was lost: {type(error).__name__}"
            return self._line(time.time(), "error", "log_lost", {"message": message, "lines": 1}, message)

    def _lost_line(self) -> str:
        lost, self._num_lost = self._num_lost, 0
        message = f"{lost} log lines were dropped: standard error was not read fast enough"
        return self._line(time.time(), "warning", "log_lost", {"message": message, "lines": lost}, message)


class LibraryHandler(logging.Handler):
    """Writes log messages of uvicorn and asyncio to the server's log. Tracebacks are dropped: they may quote a
    request."""

    def __init__(self, log: ServerLog) -> None:
        super().__init__(logging.WARNING)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        self._log.event("library", f"{record.name}: {record.getMessage()}", record.levelname.lower())


def _sentence(fields: Mapping[str, Any]) -> str:
    """The text form of a request's log line: status, route, tokens, finish reasons, seconds, key, id."""
    parts = [f"{fields.get('status', '---')} {fields['method']} {ascii(fields['route'])[1:-1]}"]
    if "completion_tokens" in fields:
        cached = f" ({fields['cached_tokens']} cached)" if fields["cached_tokens"] else ""
        parts.append(f"{fields['prompt_tokens']}{cached} + {fields['completion_tokens']} tokens")
        parts.append(" ".join(sorted(set(fields["finish_reasons"]))))
    elif "inputs" in fields:
        parts.append(f"{fields['inputs']} inputs, {fields['prompt_tokens']} tokens")
    if "error_code" in fields:
        parts.append(fields["error_code"])
    if "client_gone" in fields:
        parts.append("client gone")
    parts.append(f"{fields['total_seconds']:.3f} s")
    if "key" in fields:
        parts.append(fields["key"])
    return ", ".join([*parts, fields["request_id"]])


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
