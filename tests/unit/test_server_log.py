"""The server's log: one line per request, in text or JSON, without blocking the server."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import threading
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from weft.request import FinishReason, GenerationResult, RequestId, RequestState, numbered_ids
from weft.server import logs
from weft.server.http.access_log import AccessLog
from weft.server.logs import LibraryHandler, Record, ServerLog, current_record

RESULT = GenerationResult(
    *(RequestId("1"), (5, 6, 7), "secret answer", RequestState.COMPLETED, FinishReason.LENGTH, None),
    *(0.25, 0.5, 1.0, 0.75, 3, 11, 4, 0),
)


def lines_of(log: ServerLog, stream: io.StringIO) -> list[str]:
    log.close()
    return stream.getvalue().splitlines()


def served(app: Any, log_format: Any = "json", headers: Any = (), path: str = "/v1/x") -> tuple[Any, Any]:
    """The messages that an application inside `AccessLog` sent, and the log lines."""
    stream, sent = io.StringIO(), []
    log = ServerLog(log_format, stream)

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": path, "headers": list(headers)}
    asyncio.run(AccessLog(app, log, numbered_ids())(scope, None, send))  # type: ignore[arg-type]
    return sent, lines_of(log, stream)


def answering(status: int = 200) -> Any:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        record = current_record()
        record.results, record.num_choices_per_prompt, record.is_streamed = [RESULT, RESULT], 2, True
        scope["weft.key"] = SimpleNamespace(name="team-a")
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    return app


def test_a_request_is_logged_with_its_tokens_times_and_key() -> None:
    _, [line] = served(answering())
    logged = json.loads(line)
    assert logged.pop("time").endswith("Z") and logged.pop("total_seconds") >= 0 and logged.pop("request_id")
    assert logged == {
        "level": "info",
        "event": "request",
        "key": "team-a",
        "method": "POST",
        "route": "/v1/x",
        "status": 200,
        "stream": True,
        "prompt_tokens": 11,
        "cached_tokens": 4,
        "completion_tokens": 6,
        "finish_reasons": ["length", "length"],
        "queue_seconds": 0.25,
        "first_token_seconds": 0.75,
    }


def test_the_text_format_has_the_same_values_in_short() -> None:
    _, [line] = served(answering(), "text", [(b"x-request-id", b"abc-1")])
    assert "200 POST /v1/x, 11 (4 cached) + 6 tokens, length" in line and line.endswith("team-a, abc-1")


def test_the_log_never_contains_an_answer() -> None:
    for log_format in ("json", "text"):
        assert "secret" not in str(served(answering(), log_format)[1])


@pytest.mark.parametrize(
    ("given", "is_kept"),
    [
        (b"abc-1", True),
        (b"a" * 128, True),
        (b"", False),
        (b"a" * 129, False),
        (b"a b", False),
        (b"\xff", False),
    ],
)
def test_the_id_that_the_client_sent_is_used_if_it_is_valid(given: bytes, is_kept: bool) -> None:
    sent, [line] = served(answering(), headers=[(b"x-request-id", given)])
    logged = dict(sent[0]["headers"])[b"x-request-id"]
    assert (logged == given) is is_kept and logged
    assert json.loads(line)["request_id"] == logged.decode()


def test_an_exception_becomes_a_500_and_a_log_line_with_frames_but_no_message() -> None:
    async def broken(scope: Any, receive: Any, send: Any) -> None:
        raise ValueError("".join(reversed("terces")))

    sent, lines = served(broken)
    assert sent[0]["status"] == 500 and json.loads(sent[1]["body"])["error"]["code"] == "internal_error"
    internal, request = map(json.loads, lines)
    assert internal["event"] == "mistake" and "in broken" in internal["traceback"]
    assert request["status"] == 500 and request["error_code"] == "internal_error"
    assert "secret" not in str(lines)


def test_health_checks_are_logged_only_when_they_fail() -> None:
    assert served(answering(), path="/health")[1] == []
    assert len(served(answering(503), path="/health")[1]) == 1


def test_off_writes_nothing_and_auto_writes_json_to_a_pipe() -> None:
    assert served(answering(), "off")[1] == []
    assert ServerLog("auto", io.StringIO()).format == "json"


def test_a_slow_reader_of_the_log_loses_lines_and_does_not_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "_MAX_LINES", 4)
    monkeypatch.setattr(logs, "_FLUSH_SECONDS", 60.0)  # long enough to write all queued lines on any machine
    may_write = threading.Event()

    class Stuck(io.StringIO):
        def write(self, text: str) -> int:
            may_write.wait()
            return super().write(text)

    stream = Stuck()
    log = ServerLog("json", stream)
    for _ in range(100):
        log.request(Record("GET", "/x", RequestId("id")))
    may_write.set()
    lines = [json.loads(line) for line in lines_of(log, stream)]
    lost = sum(line["lines"] for line in lines if line["event"] == "log_lost")
    assert lost >= 90 and lost + len(lines) - sum(line["event"] == "log_lost" for line in lines) == 100


@pytest.mark.parametrize("error", [TypeError, MemoryError, RecursionError, OSError])
def test_a_line_that_cannot_be_made_is_reported_and_later_lines_are_written(error: type[Exception]) -> None:
    def line() -> str:
        raise error("secret prompt")

    stream = io.StringIO()
    log = ServerLog("text", stream)
    log._put(line)
    log.event("b", "later")
    lost, later = lines_of(log, stream)
    assert lost.endswith(f"a log line was lost: {error.__name__}") and later.endswith("later")


def test_a_field_that_json_does_not_know_loses_one_line() -> None:
    stream = io.StringIO()
    log = ServerLog("json", stream)
    log.event("a", "first", field=object())
    log.event("b", "second")
    lost, later = map(json.loads, lines_of(log, stream))
    assert (lost["event"], lost["lines"], later["event"]) == ("log_lost", 1, "b")


def test_a_stream_that_fails_once_gets_the_later_lines() -> None:
    class Stream(io.StringIO):
        failures: ClassVar = [MemoryError(), OSError(), TypeError()]

        def write(self, text: str) -> int:
            if self.failures:
                raise self.failures.pop()
            return super().write(text)

    stream = Stream()
    log = ServerLog("json", stream)
    for number in range(4):
        log.event("a", str(number))
    assert [json.loads(line)["message"] for line in lines_of(log, stream)] == ["3"]


def test_a_message_of_a_library_is_logged_without_its_traceback() -> None:
    stream = io.StringIO()
    log = ServerLog("json", stream)
    logger = logging.Logger("some.library")
    logger.addHandler(LibraryHandler(log))
    try:
        raise ValueError("secret")
    except ValueError:
        logger.exception("it broke")
    logger.info("chatter")
    [line] = map(json.loads, lines_of(log, stream))
    assert (
        line["event"] == "library"
        and line["message"] == "some.library: it broke"
        and line["level"] == "error"
    )
