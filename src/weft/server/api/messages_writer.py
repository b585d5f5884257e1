"""Writes answers of the Anthropic Messages API: the events of a stream, one message, or an error."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from weft.request import FinishReason, GenerationResult
from weft.server.api.answer_format import AnswerContext, AnswerWriter, around_text
from weft.server.api.response_shapes import Shape
from weft.server.errors import ApiError
from weft.server.logs import current_record
from weft.server.stream.choices import Choices, Piece
from weft.text.answer_parts import AnswerParts, Content, Delta, ParsedCall, Reasoning, ToolCallStart

SIGNATURE = "weft"
"""The signature of thinking blocks. Clients expect one and send it back. It proves nothing, and none is checked."""
UNSUPPORTED_THREAD = "thread_unsupported_request"
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
_PING = b'event: ping\ndata: {"type":"ping"}\n\n'
_STOP = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'

_encode = msgspec.json.Encoder().encode

# ---------------------------------------------------------------------- the types of responses


class TextBlock(Shape, tag_field="type", tag="text"):
    text: str


class ThinkingBlock(Shape, tag_field="type", tag="thinking"):
    thinking: str
    signature: str


class ToolUseBlock(Shape, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


Block = TextBlock | ThinkingBlock | ToolUseBlock
StopReason = Literal["end_turn", "max_tokens", "model_context_window_exceeded", "stop_sequence", "tool_use"]


class MessageUsage(Shape):
    """All tokens of the prompt: the first three numbers together."""

    input_tokens: Annotated[
        int, Meta(description="Prompt tokens that are in neither of the next two numbers.")
    ]
    cache_creation_input_tokens: Annotated[
        int,
        Meta(
            description="Prompt tokens that the same request would find in the cache and this one did not. 0 without "
            "cache_control."
        ),
    ]
    cache_read_input_tokens: Annotated[
        int, Meta(description="Prompt tokens that were found in the prefix cache.")
    ]
    output_tokens: int


class MessageAnswer(Shape):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Block]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class InputTokens(Shape):
    input_tokens: int


class MessageDelta(Shape):
    """The changes of one event: of a block, or of the message at its end."""

    type: Literal["text_delta", "thinking_delta", "signature_delta", "input_json_delta"] | UnsetType = UNSET
    text: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    signature: str | UnsetType = UNSET
    partial_json: str | UnsetType = UNSET
    stop_reason: StopReason | UnsetType | None = UNSET
    stop_sequence: str | UnsetType | None = UNSET


class ErrorDetails(Shape):
    error_code: str
    unsupported: list[str]


class ErrorContent(Shape):
    type: Annotated[str, Meta(description="The class of the error, such as invalid_request_error.")]
    message: str
    details: Annotated[ErrorDetails | UnsetType, Meta(description="Only for a request with a `thread`.")] = (
        UNSET
    )


class StreamEvent(Shape):
    """One event of a stream."""

    type: Literal[
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
        "ping",
        "error",
    ]
    message: MessageAnswer | UnsetType = UNSET
    index: int | UnsetType = UNSET
    content_block: Block | UnsetType = UNSET
    delta: MessageDelta | UnsetType = UNSET
    usage: MessageUsage | UnsetType = UNSET
    error: ErrorContent | UnsetType = UNSET
    request_id: str | UnsetType | None = UNSET


class ErrorBody(Shape):
    """The body of every failed request of the Anthropic API."""

    type: Literal["error"]
    error: ErrorContent
    request_id: str


def error_body(error: ApiError) -> dict[str, Any]:
    kind = _TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    message = error.message
    if error.prompt_lengths is not None:
        # Claude Code recognises this sentence and reads both numbers.
        message = "prompt is too long: {} tokens > {} maximum".format(*error.prompt_lengths)
    content: dict[str, Any] = {"type": kind, "message": message}
    if error.code == UNSUPPORTED_THREAD:
        content["details"] = {"error_code": error.code, "unsupported": [error.param]}
    return {
        "type": "error",
        "error": content,
        "request_id": current_record().request_id,
    }


# ---------------------------------------------------------------------- the writer


class MessagesWriter(AnswerWriter):
    """Streams the content blocks of a message one after the other. A content block ends when the next one begins, or at the
    end of the stream."""

    def __init__(self, context: AnswerContext, max_tokens: int | None) -> None:
        super().__init__(context)
        self._max_tokens = max_tokens
        self._num_blocks = 0
        self._has_calls = False
        self._open_block: type[Delta] | None = None
        self._around_delta: tuple[bytes, bytes] = b"", b""
        """The bytes around the text of a delta of the open block."""

    # ------------------------------------------------------------------ a stream

    def begin(self) -> bytes:
        usage = {**self._cache_usage(0, 0), "output_tokens": 0}
        return _event("message_start", message=self._message([], None, None, usage)) + _PING

    def keep_alive(self) -> bytes:
        return _PING

    def events(self, pieces: Sequence[Piece]) -> bytes:
        written: list[bytes] = []
        for piece in pieces:
            if piece.deltas is not None:
                for delta in piece.deltas:
                    self._write(delta, written)
            elif piece.text:
                self._write_text(Content, piece.text, written)
            if piece.choice.result is not None:
                if self._num_blocks == 0 and self._open_block is None:
                    # Clients read the first block, so there must be one.
                    self._write_text(Content, "", written)
                self._close(written)
        return written[0] if len(written) == 1 else b"".join(written)

    def end(self, choices: Choices) -> bytes:
        [result] = choices.results
        delta = {
            "stop_reason": self._stop_reason(result, self._has_calls),
            "stop_sequence": result.stop_string,
        }
        return _event("message_delta", delta=delta, usage=self._usage(result)) + _STOP

    def error(self, error: ApiError) -> bytes:
        return b"event: error\ndata: " + _encode(error_body(error)) + b"\n\n"

    def _write(self, delta: Delta, written: list[bytes]) -> None:
        if isinstance(delta, ToolCallStart):
            self._has_calls = True
            block = {"type": "tool_use", "id": _call_id(delta.id), "name": delta.name, "input": {}}
            self._open(ToolCallStart, block, "input_json_delta", "partial_json", written)
        elif isinstance(delta, Content | Reasoning):
            self._write_text(type(delta), delta.text, written)
        else:
            written.append(self._delta(delta.text))

    def _write_text(self, kind: type[Content | Reasoning], text: str, written: list[bytes]) -> None:
        if self._open_block is not kind:
            if kind is Content:
                self._open(kind, {"type": "text", "text": ""}, "text_delta", "text", written)
            else:
                block = {"type": "thinking", "thinking": "", "signature": ""}
                self._open(kind, block, "thinking_delta", "thinking", written)
        if text:
            written.append(self._delta(text))

    def _open(
        self, kind: type[Delta], block: dict[str, Any], delta_type: str, field: str, written: list[bytes]
    ) -> None:
        """Opens a block after the end of the one before."""
        self._close(written)
        written.append(_event("content_block_start", index=self._num_blocks, content_block=block))
        self._around_delta = around_text(self._delta_event({"type": delta_type, field: ""}))
        self._open_block = kind

    def _close(self, written: list[bytes]) -> None:
        if self._open_block is None:
            return
        if self._open_block is Reasoning:
            written.append(self._delta_event({"type": "signature_delta", "signature": SIGNATURE}))
        written.append(_event("content_block_stop", index=self._num_blocks))
        self._num_blocks += 1
        self._open_block = None

    def _delta(self, text: str) -> bytes:
        before, after = self._around_delta
        return before + _encode(text) + after

    def _delta_event(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._num_blocks, delta=delta)

    # ------------------------------------------------------------------ one body

    def answer(self, index: int, result: GenerationResult, answer: str | AnswerParts) -> tuple[bytes, bytes]:
        blocks, has_calls = _blocks(AnswerParts([Content(answer)]) if isinstance(answer, str) else answer)
        reason = self._stop_reason(result, has_calls)
        return _encode(self._message(blocks, reason, result.stop_string, self._usage(result))), b""

    def _message(
        self,
        content: list[dict[str, Any]],
        stop_reason: str | None,
        stop_sequence: str | None,
        usage: dict[str, int],
    ) -> dict[str, Any]:
        return {
            "id": f"msg_{self.context.request_id}",
            "type": "message",
            "role": "assistant",
            "model": self.context.model,
            "content": content,
            "stop_reason": stop_reason,
            "stop_sequence": stop_sequence,
            "usage": usage,
        }

    def _stop_reason(self, result: GenerationResult, has_calls: bool) -> str:
        if result.finish_reason is FinishReason.LENGTH:
            is_cut = result.completion_token_count == self._max_tokens
            return "max_tokens" if is_cut else "model_context_window_exceeded"
        if result.stop_string is not None:
            return "stop_sequence"
        return "tool_use" if has_calls else "end_turn"

    def _usage(self, result: GenerationResult) -> dict[str, int]:
        cached = result.cached_token_count
        created = max(0, self.context.cacheable_tokens - cached) if self.context.has_session else 0
        return {**self._cache_usage(created, cached), "output_tokens": result.completion_token_count}

    def _cache_usage(self, created: int, cached: int) -> dict[str, int]:
        return {
            "input_tokens": self.context.prompt_tokens - created - cached,
            "cache_creation_input_tokens": created,
            "cache_read_input_tokens": cached,
        }


def _event(kind: str, **content: Any) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + _encode({"type": kind, **content}) + b"\n\n"


def _call_id(call_id: str) -> str:
    return f"toolu_{call_id.removeprefix('call_')}"


def _blocks(answer: AnswerParts) -> tuple[list[dict[str, Any]], bool]:
    """The blocks of an answer, in the order of the stream, and whether some are calls."""
    blocks: list[dict[str, Any]] = []
    for kind, group in groupby(map(_block, answer.parts), lambda block: block["type"]):
        if kind == "text":
            blocks.append({"type": "text", "text": "".join(one["text"] for one in group)})
        else:
            blocks += group
    return blocks or [{"type": "text", "text": ""}], any(one["type"] == "tool_use" for one in blocks)


def _block(part: Content | Reasoning | ParsedCall) -> dict[str, Any]:
    if isinstance(part, Reasoning):
        return {"type": "thinking", "thinking": part.text, "signature": SIGNATURE}
    if isinstance(part, ParsedCall) and (arguments := _arguments(part)) is not None:
        return {"type": "tool_use", "id": _call_id(part.id), "name": part.name, "input": arguments}
    # An incomplete call becomes text: the client would run a call with wrong input.
    return {"type": "text", "text": part.text}


def _arguments(call: ParsedCall) -> dict[str, Any] | None:
    """The arguments as an object; None if they are incomplete."""
    try:
        arguments = msgspec.json.decode(call.arguments)
    except (ValueError, RecursionError):
        return None
    return arguments if isinstance(arguments, dict) else None
