"""Adapts the tool calls and results in a chat's history to the templates of a tool format."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from weft.text.tool_formats import SHORT_ID, ToolFormat


def adapt_tool_history(messages: Sequence[Any], tool_format: ToolFormat) -> Sequence[Any]:
    """Converts messages with several calls, or with long call ids, for templates that do not accept them.

    Clients send such messages, because other servers return them.
    """
    if tool_format.is_single_call:
        messages = _one_call_at_a_time(messages)
    if tool_format.has_short_ids:
        messages = [
            _with_short_ids(message) if isinstance(message, Mapping) else message for message in messages
        ]
    return messages


def _one_call_at_a_time(messages: Sequence[Any]) -> list[Any]:
    """Splits a message with several calls into messages with one call, each followed by its result."""
    result: list[Any] = []
    position = 0
    while position < len(messages):
        message = messages[position]
        position += 1
        calls = message.get("tool_calls") if isinstance(message, Mapping) else None
        if not isinstance(calls, Sequence) or len(calls) < 2:
            result.append(message)
            continue
        results: list[Any] = []
        while position < len(messages) and _is_result(messages[position]):
            results.append(messages[position])
            position += 1
        for number, call in enumerate(calls):
            content = {} if number == 0 else {"content": ""}
            result.append({**message, **content, "tool_calls": [call]})
            call_id = call.get("id") if isinstance(call, Mapping) else None
            result += [one for one in results if one.get("tool_call_id") == call_id]
        ids = [call.get("id") for call in calls if isinstance(call, Mapping)]
        result += [one for one in results if one.get("tool_call_id") not in ids]
    return result


def _is_result(message: Any) -> bool:
    return isinstance(message, Mapping) and message.get("role") == "tool"


def _with_short_ids(message: Mapping[str, Any]) -> Mapping[str, Any]:
    changed: dict[str, Any] = {}
    if isinstance(call_id := message.get("tool_call_id"), str):
        changed["tool_call_id"] = _short(call_id)
    if isinstance(calls := message.get("tool_calls"), Sequence):
        changed["tool_calls"] = [
            {**call, "id": _short(call["id"])}
            if isinstance(call, Mapping) and isinstance(call.get("id"), str)
            else call
            for call in calls
        ]
    return {**message, **changed}


def _short(call_id: str) -> str:
    """A short id, the same for a call and its result."""
    if SHORT_ID.fullmatch(call_id):
        return call_id
    return hashlib.sha256(call_id.encode("utf-8", "surrogatepass")).hexdigest()[:9]
