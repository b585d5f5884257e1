"""The shapes of errors and streams of each API, for tests that send requests to all of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

from anthropic_types import EventStream
from ollama_lines import validated
from responses_checks import checked_events

Family = Literal["openai", "anthropic", "ollama", "rerank"]
_NO_PROBLEM = {"deadline_exceeded", "cannot_continue", "slow_reader"}
"""Codes of errors that a stream may end with because of its own request."""


def family(path: str, headers: Mapping[bytes, bytes] = {}) -> Family:
    """The API whose errors a route has."""
    if path == "/v1/messages" or path.startswith("/v1/messages/"):
        return "anthropic"
    if path == "/api" or path.startswith("/api/"):
        return "ollama"
    if path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        return "rerank"
    is_shared = not path.startswith(("/v1/chat/completions", "/v1/completions", "/v1/responses"))
    return "anthropic" if is_shared and b"anthropic-version" in headers else "openai"


def message_of_error(family: Family, content: Any) -> str:
    """The message of an error. Raises AssertionError if it does not have the shape of its API."""
    if family == "ollama":
        assert set(content) == {"error"} and isinstance(content["error"], str), content
        message = content["error"]
    elif family == "anthropic":
        assert set(content) == {"type", "error", "request_id"} and content["type"] == "error", content
        assert set(content["error"]) == {"message", "type"} and content["request_id"], content
        message = content["error"]["message"]
    else:
        if family == "rerank":
            content = dict(content)
            assert content.pop("message") == content["error"]["message"], content
        assert set(content) == {"error"}, content
        assert set(content["error"]) == {"message", "type", "param", "code"}, content
        message = content["error"]["message"]
    assert message and isinstance(message, str), content
    return message


def problem_of_error(family: Family, content: Any) -> str | None:
    try:
        message_of_error(family, content)
    except (AssertionError, TypeError, KeyError) as problem:
        return f"not an error of the {family} API: {problem!r:.300}"
    return None


def problem_of_stream(path: str, body: bytes) -> str | None:
    """The problem of a whole stream; None if there is none."""
    try:
        error = _error_of_stream(path, body)
    except Exception as problem:  # also those of pydantic and msgspec
        return f"{problem!r:.600} in {body[:400]!r}"
    return f"in a stream: {error}" if error is not None and not _is_of_request(error) else None


def _is_of_request(error: Any) -> bool:
    text = json.dumps(error)
    return any(code in text for code in _NO_PROBLEM) or "deadline" in text or "timeout" in text


def _error_of_stream(path: str, body: bytes) -> Any:
    if path == "/v1/messages":
        return EventStream(body).error
    if path == "/v1/responses":
        return checked_events(body)[-1]["response"]["error"]
    if path.startswith("/api/"):
        *lines, last = [json.loads(line) for line in body.splitlines()]
        assert body.endswith(b"\n") and not any("error" in one or one.get("done") for one in lines)
        if "error" in last:
            return message_of_error("ollama", last)
        for line in body.splitlines():
            validated(path, line)
        assert last.get("done") or last.get("status") == "success"
        return None
    if path == "/live":
        for event in body.removesuffix(b"\n\n").split(b"\n\n"):
            assert json.loads(event.removeprefix(b"data: "))["engine"] in ("ready", "silent"), event
        return None
    *events, last, end = body.split(b"\n\n")
    assert not end and all(event.startswith(b"data: {") for event in events)
    if last == b"data: [DONE]":
        return None
    error = json.loads(last.removeprefix(b"data: "))
    message_of_error("openai", error)
    return error
