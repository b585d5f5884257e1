"""Adapts the tool calls and results in a chat's history to the templates of a tool format."""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from weft.text.tool_formats import SHORT_ID, ToolFormat


def sorted_by_name(tools: Sequence[Mapping[str, Any]] | None) -> Sequence[Mapping[str, Any]] | None:
    """The tools in the order of their names. They need not be valid."""
    if not isinstance(tools, list | tuple) or not all(isinstance(tool, Mapping) for tool in tools):
        return tools
    return sorted(tools, key=_name)


def _name(tool: Mapping[str, Any]) -> str:
    function = tool.get("function")
    return str((function if isinstance(function, Mapping) else tool).get("name"))


def results_in_call_order(messages: Sequence[Any]) -> list[Any]:
    """Returns the messages with the results of parallel calls in the order of the calls. Clients send results as they
    arrive, and many templates render no ids."""
    ordered: list[Any] = []
    for message, results in _turns(messages):
        ids = [_text_id(call.get("id")) for call in _calls(message)]
        if len(ids) > 1 and None not in ids:
            # Results of unknown calls come last.
            places = {call_id: place for place, call_id in reversed([*enumerate(ids)])}
            results.sort(key=lambda one: places.get(_text_id(one.get("tool_call_id")), len(ids)))
        ordered += [*message, *results]
    return ordered


def adapt_tool_history(messages: Sequence[Any], tool_format: ToolFormat) -> Sequence[Any]:
    """Converts messages with several calls, or without short call ids, for templates that do not accept them.

    Clients send such messages: ids of other servers are long, and the Ollama API has none.
    """
    if tool_format.is_single_call or tool_format.has_short_ids:
        messages = _with_ids(messages)
    if tool_format.is_single_call:
        messages = _one_call_at_a_time(messages)
    if tool_format.has_short_ids:
        messages = [
            _with_short_ids(message) if isinstance(message, Mapping) else message for message in messages
        ]
    return messages


def _turns(messages: Iterable[Any]) -> Iterable[tuple[list[Any], list[Any]]]:
    """Each message that is no result, with the results after it. Results at the beginning have no message."""
    message: list[Any] = []
    results: list[Any] = []
    for one in messages:
        if isinstance(one, Mapping) and one.get("role") == "tool":
            results.append(one)
            continue
        yield message, results
        message, results = [one], []
    yield message, results


def _calls(message: Sequence[Any]) -> list[Mapping[str, Any]]:
    """The calls of one message, if there is one and they are valid."""
    calls = message[0].get("tool_calls") if message and isinstance(message[0], Mapping) else None
    if not isinstance(calls, Sequence) or not all(isinstance(call, Mapping) for call in calls):
        return []
    return list(calls)


def _with_ids(messages: Sequence[Any]) -> list[Any]:
    """Gives an id to each call without one. A result without an id gets the id of the next call without a result."""
    changed: list[Any] = []
    for message, results in _turns(messages):
        calls = _calls(message)
        if any(_text_id(call.get("id")) is None for call in calls):
            calls = [
                call
                if _text_id(call.get("id")) is not None
                else {**call, "id": f"call-{len(changed)}-{place}"}
                for place, call in enumerate(calls)
            ]
            message = [{**message[0], "tool_calls": calls}]
        changed += message
        answered = {_text_id(one.get("tool_call_id")) for one in results}
        free = iter([call["id"] for call in calls if call["id"] not in answered])
        for one in results:
            if _text_id(one.get("tool_call_id")) is None and (call_id := next(free, None)) is not None:
                one = {**one, "tool_call_id": call_id}
            changed.append(one)
    return changed


def _one_call_at_a_time(messages: Sequence[Any]) -> list[Any]:
    """Splits a message with several calls into messages with one call, each followed by its result."""
    split: list[Any] = []
    for message, results in _turns(messages):
        calls = _calls(message)
        if len(calls) < 2:
            split += [*message, *results]
            continue
        answers: dict[str | None, deque[Any]] = {}
        for one in results:
            answers.setdefault(_text_id(one.get("tool_call_id")), deque()).append(one)
        unanswered = Counter(_text_id(call.get("id")) for call in calls)
        for number, call in enumerate(calls):
            content = {} if number == 0 else {"content": ""}
            split.append({**message[0], **content, "tool_calls": [call]})
            call_id = _text_id(call.get("id"))
            unanswered[call_id] -= 1
            own = answers.get(call_id, deque())
            # If several calls have the same id, each gets one result, and the last one also gets those that are left.
            split += [own.popleft() for _ in range(min(1, len(own)) if unanswered[call_id] else len(own))]
        split += [one for group in answers.values() for one in group]
    return split


def _with_short_ids(message: Mapping[str, Any]) -> Mapping[str, Any]:
    changed: dict[str, Any] = {}
    if isinstance(call_id := message.get("tool_call_id"), str):
        changed["tool_call_id"] = _short(call_id)
    if calls := _calls([message]):
        changed["tool_calls"] = [
            {**call, "id": _short(call["id"])} if isinstance(call.get("id"), str) else call for call in calls
        ]
    return {**message, **changed}


def _text_id(call_id: Any) -> str | None:
    """The id if it is a text that is not empty."""
    return call_id if isinstance(call_id, str) and call_id else None


def _short(call_id: str) -> str:
    """A short id, the same for a call and its result."""
    if SHORT_ID.fullmatch(call_id):
        return call_id
    return hashlib.sha256(call_id.encode("utf-8", "surrogatepass")).hexdigest()[:9]
