"""Checks of answers of the Responses API: the types of the openai package in strict mode, and the order of events."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pydantic
from openai.types.responses import Response, ResponseStreamEvent

from weft.server.api.responses_shapes import ResponseEvent, ResponseObject

_EVENT: Any = pydantic.TypeAdapter(ResponseStreamEvent)
_TEXT = ("response.content_part", "response.output_text", "part")
_THOUGHT = ("response.content_part", "response.reasoning_text", "part")
_ANNOTATION = "response.output_text.annotation.added"
_SUMMARY = ("response.reasoning_summary_part", "response.reasoning_summary_text", "part")


def checked_response(body: bytes | str) -> dict[str, Any]:
    """The response object, after it was compared with the types of the openai package and of the OpenAPI document."""
    Response.model_validate_json(body, strict=True)
    msgspec.json.decode(body, type=ResponseObject)
    content: dict[str, Any] = json.loads(body)
    return content


def checked_events(body: bytes) -> list[dict[str, Any]]:
    """The events of a whole stream, after their types and their order were checked."""
    events = []
    for block in body.decode().removesuffix("\n\n").split("\n\n"):
        first, second = block.split("\n")
        event = json.loads(second.removeprefix("data: "))
        assert first == f"event: {event['type']}"
        _EVENT.validate_json(second.removeprefix("data: "), strict=True)
        msgspec.json.decode(second.removeprefix("data: "), type=ResponseEvent)
        events.append(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    _check_order(events)
    return events


def _check_order(events: list[dict[str, Any]]) -> None:
    """Follows the documentation of the OpenAI API: created, in_progress, then items one after the other, then the end."""
    types = [event["type"] for event in events]
    assert types[:2] == ["response.created", "response.in_progress"]
    assert types[-1] in ("response.completed", "response.incomplete", "response.failed")
    rest = [event for event in events[2:-1] if event["type"] != "response.in_progress"]
    position, items = 0, []
    while position < len(rest):
        if types[-1] == "response.failed" and not _has_end(rest[position:]):
            break
        item, position = _check_item(rest, position, len(items))
        items.append(item)
    final = events[-1]["response"]
    assert final["output"] == items
    assert {event["response"]["id"] for event in events if "response" in event} == {final["id"]}


def _has_end(events: list[dict[str, Any]]) -> bool:
    return any(event["type"] == "response.output_item.done" for event in events)


def _check_item(events: list[dict[str, Any]], position: int, index: int) -> tuple[dict[str, Any], int]:
    """Checks the events of one item. Returns the item and the position after it."""
    added = events[position]
    assert (added["type"], added["output_index"]) == ("response.output_item.added", index)
    end = next(i for i in range(position, len(events)) if events[i]["type"] == "response.output_item.done")
    done, inner = events[end], events[position + 1 : end]
    item, kind = done["item"], done["item"]["type"]
    assert done["output_index"] == index
    assert (added["item"]["id"], added["item"]["type"]) == (item["id"], kind)
    assert all((event["item_id"], event["output_index"]) == (item["id"], index) for event in inner)
    types = [event["type"] for event in inner]
    if kind == "file_search_call":
        steps = ("in_progress", "searching", "completed")
        assert types == [f"response.file_search_call.{step}" for step in steps]
        return item, end + 1
    if kind in ("function_call", "custom_tool_call"):
        name, field = (
            ("response.function_call_arguments", "arguments")
            if kind == "function_call"
            else ("response.custom_tool_call_input", "input")
        )
        assert types == [f"{name}.delta"] * (len(types) - 1) + [f"{name}.done"]
        assert "".join(event["delta"] for event in inner[:-1]) == inner[-1][field] == item[field]
        return item, end + 1
    if kind == "message":
        part_name, text_name, field = _TEXT
        part = item["content"][0]
    else:
        part_name, text_name, field = _SUMMARY if item["summary"] else _THOUGHT
        part = (item["summary"] or item["content"])[0]
    cited = [event["annotation"] for event in inner if event["type"] == _ANNOTATION]
    assert cited == part.get("annotations", [])
    assert types[1 : -2 - len(cited)].count(_ANNOTATION) == 0, "citations come after the text"
    inner = [event for event in inner if event["type"] != _ANNOTATION]
    types = [event["type"] for event in inner]
    deltas = types[1:-2]
    assert types == [
        f"{part_name}.added",
        *[f"{text_name}.delta"] * len(deltas),
        f"{text_name}.done",
        f"{part_name}.done",
    ]
    assert inner[0][field]["text"] == ""
    assert "".join(event["delta"] for event in inner[1:-2]) == inner[-2]["text"] == part["text"]
    assert inner[-1][field] == part
    return item, end + 1
