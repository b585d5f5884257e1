"""Checks answers of the Anthropic API: their types with the official package, the order of events with a state machine
that is written from the documentation of the API."""

from __future__ import annotations

import json
from typing import Any

import msgspec
from anthropic.types import Message, MessageTokensCount, ModelInfo, RawMessageStreamEvent
from anthropic.types.shared.error_response import ErrorResponse
from pydantic import BaseModel, TypeAdapter

from weft.server.api import messages_writer as shapes

_EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
_DELTAS = {
    "text": {"text_delta"},
    "thinking": {"thinking_delta", "signature_delta"},
    "tool_use": {"input_json_delta"},
}


def checked(kind: Any, body: bytes | str) -> Any:
    """The body as an object of the package. It has the right types, and no field that the package does not know."""
    found = TypeAdapter(kind).validate_json(body, strict=True)
    _check_known(found)
    return found


def message_of(body: bytes | str) -> Message:
    msgspec.json.decode(body, type=shapes.MessageAnswer)
    found: Message = checked(Message, body)
    assert found.stop_reason is not None
    return found


def count_of(body: bytes | str) -> int:
    return int(checked(MessageTokensCount, body).input_tokens)


def model_of(content: Any) -> ModelInfo:
    found: ModelInfo = checked(ModelInfo, json.dumps(content))
    return found


def error_of(body: bytes | str, kind: str) -> str:
    """The message of an error of this type."""
    msgspec.json.decode(body, type=shapes.ErrorBody)
    content = json.loads(body)
    if kind != "request_too_large":  # in the documentation of the API, but not in the package
        checked(ErrorResponse, body)
    assert content["type"] == "error" and content["error"]["type"] == kind, content
    assert content["request_id"]
    return str(content["error"]["message"])


class EventStream:
    """Reads the bytes of a stream. Raises AssertionError for an event with a wrong type, field or place."""

    def __init__(self, body: bytes) -> None:
        self.events: list[dict[str, Any]] = []
        self.blocks: list[dict[str, Any]] = []
        self.num_pings = 0
        self.error: dict[str, Any] | None = None
        self.stop_reason: str | None = None
        self.stop_sequence: str | None = None
        self.usage: dict[str, Any] = {}
        self._state = "start"
        self._open: dict[str, Any] | None = None
        assert body.endswith(b"\n\n")
        for event in body.decode().removesuffix("\n\n").split("\n\n"):
            name, data = event.split("\n")
            content = json.loads(data.removeprefix("data: "))
            assert name == f"event: {content['type']}" and data.startswith("data: ")
            msgspec.convert(content, shapes.StreamEvent)
            self._add(content)
        assert self._state == "over", f"the stream ends in the state {self._state}"

    @property
    def texts(self) -> list[str]:
        """The text of each block."""
        return [block["whole"] for block in self.blocks]

    def _add(self, event: dict[str, Any]) -> None:
        assert self._state != "over", f"{event} follows the last event"
        self.events.append(event)
        kind = event["type"]
        if kind == "ping":
            self.num_pings += 1
            return
        if kind == "error":
            checked(ErrorResponse, json.dumps(event))
            self.error, self._state = event["error"], "over"
            return
        _check_known(_EVENT.validate_json(json.dumps(event), strict=True))
        getattr(self, f"_{kind}")(event)

    def _message_start(self, event: dict[str, Any]) -> None:
        assert self._state == "start"
        self._state = "message"
        message = event["message"]
        assert message["content"] == [] and message["stop_reason"] is None
        self.message, self.usage = message, dict(message["usage"])

    def _content_block_start(self, event: dict[str, Any]) -> None:
        assert self._state == "message" and self._open is None
        assert event["index"] == len(self.blocks)
        block = event["content_block"]
        assert block["type"] != "tool_use" or block["input"] == {}
        self._open = {**block, "whole": ""}
        self.blocks.append(self._open)

    def _content_block_delta(self, event: dict[str, Any]) -> None:
        assert self._state == "message" and self._open is not None
        delta = event["delta"]
        kind = delta["type"]
        assert event["index"] == len(self.blocks) - 1 and kind in _DELTAS[self._open["type"]]
        assert not self._open.get("signature"), "the signature is the last delta"
        if kind == "signature_delta":
            self._open["signature"] = delta["signature"]
        else:
            self._open["whole"] += delta.get("text") or delta.get("thinking") or delta.get("partial_json")

    def _content_block_stop(self, event: dict[str, Any]) -> None:
        assert self._open is not None and event["index"] == len(self.blocks) - 1
        assert self._open["type"] != "thinking" or self._open["signature"]
        self._open = None

    def _message_delta(self, event: dict[str, Any]) -> None:
        assert self._state == "message" and self._open is None and self.blocks
        self._state = "delta"
        self.stop_reason = event["delta"]["stop_reason"]
        self.stop_sequence = event["delta"]["stop_sequence"]
        assert self.stop_reason is not None
        total = sum(self.usage[name] for name in self.usage if name != "output_tokens")
        self.usage |= event["usage"]
        assert total == sum(self.usage[name] for name in self.usage if name != "output_tokens")

    def _message_stop(self, event: dict[str, Any]) -> None:
        assert self._state == "delta"
        self._state = "over"


def _check_known(found: Any) -> None:
    if isinstance(found, BaseModel):
        assert not found.model_extra, f"{type(found).__name__} does not have {found.model_extra}"
        for name in found.model_fields_set:
            _check_known(getattr(found, name))
    elif isinstance(found, list):
        for one in found:
            _check_known(one)
