"""Reads one event of a stream: what the event says about the answer, in each API that can be measured.

An event shows which API it belongs to: chunks of chat and completion have `choices`, lines of Ollama have `done`, events
of Responses and Messages have a `type`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts, as far as the event has them."""

    prompt: int | None = None
    completion: int | None = None
    cached: int | None = None


@dataclass(slots=True)
class Event:
    num_with_tokens: int = 0
    """The number of parts with tokens. A chunk has one part for each answer."""
    finish_reason: str | None = None
    usage: Usage | None = None
    error: str | None = None
    is_last: bool = False


_RESPONSE_DELTAS = frozenset(
    {
        "response.output_text.delta",
        "response.reasoning_text.delta",
        "response.reasoning_summary_text.delta",
        "response.function_call_arguments.delta",
        "response.custom_tool_call_input.delta",
    }
)
_RESPONSE_ENDS = frozenset({"response.completed", "response.incomplete"})


def read_event(event: Mapping[str, Any]) -> Event:
    """Reads one event of any API. Raises TypeError if a part of the event has the wrong type."""
    kind = event.get("type")
    if isinstance(kind, str) and kind.startswith("response."):
        return _response_event(kind, event)
    if error := event.get("error"):
        return Event(error=str(error.get("message", error) if isinstance(error, dict) else error))
    if isinstance(kind, str) and "choices" not in event:
        return _message_event(kind, event)
    if "done" in event:
        return _ollama_line(event)
    return _chunk(event)


def _chunk(chunk: Mapping[str, Any]) -> Event:
    found = Event()
    usage = chunk.get("usage")
    if isinstance(usage, dict):
        found.usage = Usage(
            _count(usage, "prompt_tokens"),
            _count(usage, "completion_tokens"),
            _count(usage.get("prompt_tokens_details"), "cached_tokens"),
        )
    choices = chunk.get("choices") or []
    if not isinstance(choices, list):
        raise TypeError("choices is not a list")
    for choice in choices:
        if not isinstance(choice, dict):
            raise TypeError("a choice is not an object")
        if reason := choice.get("finish_reason"):
            found.finish_reason = str(reason)
        found.num_with_tokens += _carries_tokens(choice)
    return found


def _carries_tokens(choice: dict[str, Any]) -> bool:
    """Whether a chunk contains tokens. The first and the last chunk of a stream may contain none."""
    if "text" in choice:
        # A token may have no text yet (part of a character). Empty text with a finish reason ends the stream.
        return bool(choice["text"]) or choice.get("finish_reason") is None
    delta = choice.get("delta")
    return isinstance(delta, dict) and any(
        delta.get(name) for name in ("content", "reasoning_content", "reasoning", "tool_calls")
    )


def _response_event(kind: str, event: Mapping[str, Any]) -> Event:
    if kind in _RESPONSE_DELTAS:
        return Event(num_with_tokens=bool(event.get("delta")))
    response = event.get("response")
    if kind == "response.failed":
        error = response.get("error") if isinstance(response, dict) else None
        return Event(error=str(error.get("message", error) if isinstance(error, dict) else error))
    if kind not in _RESPONSE_ENDS or not isinstance(response, dict):
        return Event()
    usage = response.get("usage")
    counts = Usage(
        _count(usage, "input_tokens"),
        _count(usage, "output_tokens"),
        _count(usage.get("input_tokens_details") if isinstance(usage, dict) else None, "cached_tokens"),
    )
    return Event(finish_reason=kind.removeprefix("response."), usage=counts, is_last=True)


def _message_event(kind: str, event: Mapping[str, Any]) -> Event:
    delta = event.get("delta")
    if kind == "content_block_delta" and isinstance(delta, dict):
        names = ("text", "thinking", "partial_json")
        return Event(num_with_tokens=any(delta.get(name) for name in names))
    if kind == "message_start":
        message = event.get("message")
        return Event(usage=_message_usage(message.get("usage") if isinstance(message, dict) else None))
    if kind == "message_delta" and isinstance(delta, dict):
        reason = delta.get("stop_reason")
        return Event(
            finish_reason=None if reason is None else str(reason), usage=_message_usage(event.get("usage"))
        )
    return Event(is_last=kind == "message_stop")


def _message_usage(usage: Any) -> Usage:
    """The usage in the Messages API. Its `input_tokens` exclude tokens that were read from or written to the cache."""
    parts = [_count(usage, name) for name in ("input_tokens", "cache_creation_input_tokens")]
    cached = _count(usage, "cache_read_input_tokens")
    prompt = None if parts[0] is None else sum(one or 0 for one in (*parts, cached))
    return Usage(prompt, _count(usage, "output_tokens"), cached)


def _ollama_line(line: Mapping[str, Any]) -> Event:
    message = line.get("message")
    texts = (
        [line.get("response"), line.get("thinking")]
        if not isinstance(message, dict)
        else [message.get(name) for name in ("content", "thinking", "tool_calls")]
    )
    found = Event(num_with_tokens=any(texts))
    if line.get("done"):
        found.is_last = True
        found.finish_reason = str(line.get("done_reason", "stop"))
        found.usage = Usage(_count(line, "prompt_eval_count"), _count(line, "eval_count"))
    return found


def _count(values: Any, name: str) -> int | None:
    value = values.get(name) if isinstance(values, dict) else None
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
