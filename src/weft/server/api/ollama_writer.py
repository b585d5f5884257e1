"""Writes the answers of Ollama's API: lines of JSON, or one object."""

from __future__ import annotations

import dataclasses
import time
from abc import abstractmethod
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

import msgspec

from weft.request import GenerationResult, TokenLogprobs
from weft.server.api.answer_format import AnswerContext, AnswerWriter, around_text
from weft.server.api.logprob_entries import logprob_entry
from weft.server.errors import ApiError
from weft.server.stream.choices import Choices, Piece
from weft.text.answer_parts import (
    AnswerParts,
    Content,
    Delta,
    ParsedCall,
    Reasoning,
    ToolCallArguments,
    ToolCallStart,
)

STREAM_TYPE = "application/x-ndjson"
_TIME = "created_at"

_encode = msgspec.json.Encoder().encode


def error_body(error: ApiError) -> dict[str, str]:
    """The body of an error. The body has only a text, so the text names the field."""
    text = error.message
    if error.param and error.param not in text:
        text = f"{error.param}: {text}"
    # Some clients pull a model if the error says "not found".
    return {"error": f"model not found: {text}" if error.code == "model_not_found" else text}


def head(model: str) -> dict[str, Any]:
    """The fields that all lines have in common, with the time of this line."""
    return {"model": model, _TIME: _now()}


def rfc3339(time: datetime) -> str:
    return time.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def _now() -> str:
    """The time of a line, as `rfc3339` writes it. Every token has a line, so the text of each second is made only once."""
    second, microseconds = divmod(time.time_ns() // 1000, 1_000_000)
    return f"{_second(second)}.{microseconds:06}Z"


@lru_cache(maxsize=2)
def _second(second: int) -> str:
    return datetime.fromtimestamp(second, UTC).strftime("%Y-%m-%dT%H:%M:%S")


class OllamaWriter(AnswerWriter):
    """Writes one answer. A tool call is sent when it is complete, because its arguments are an object.

    The writer collects the logprobs itself: in Ollama's API they are a list.
    """

    stream_type = STREAM_TYPE
    smallest_entry = 40

    def __init__(self, context: AnswerContext, *, keeps_tokens: bool = False) -> None:
        """`keeps_tokens`: the answer ends with the tokens of the conversation (`context`)."""
        self._wants_logprobs = context.wants_logprobs
        super().__init__(dataclasses.replace(context, wants_logprobs=False))
        self._token_bytes = context.tokenizer.token_bytes
        self._keeps_tokens = keeps_tokens
        self._tokens: list[int] = []
        self._logprobs = bytearray()
        # A line of a stream is encoded once and split at its time and at its text, because only these change.
        line, self._after_text = around_text(self._line({_TIME: "", **self.message("", "", [])}))
        self._before_time, mark, self._before_text = line.partition(f'"{_TIME}":"'.encode())
        self._before_time += mark
        self._call: ParsedCall | None = None
        """The call whose arguments are arriving."""
        self._num_calls = 0

    @abstractmethod
    def message(self, text: str, thought: str, calls: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The fields of a line, or of a whole answer, that have its content. In their JSON, the last string must be
        `text`: see `around_text`."""

    # ------------------------------------------------------------------ a stream

    def begin(self) -> bytes:
        return self._text_line("")

    def keep_alive(self) -> bytes:
        return self._text_line("")

    def events(self, pieces: Sequence[Piece]) -> bytes:
        lines: list[bytes] = []
        for piece in pieces:
            if self._keeps_tokens:
                self._tokens += piece.tokens
            if piece.deltas is not None or self._wants_logprobs:
                lines += self._lines(piece)
            elif piece.text:
                lines.append(self._text_line(piece.text))
        return lines[0] if len(lines) == 1 else b"".join(lines)

    def _lines(self, piece: Piece) -> list[bytes]:
        messages = (
            [self.message(piece.text, "", [])] if piece.deltas is None else self._messages(piece.deltas)
        )
        if piece.deltas is not None and piece.is_last and (last := self._end_call()):
            messages.append(last)
        if self._wants_logprobs and piece.tokens:
            # The first line of a piece has the logprobs of all its tokens.
            messages = messages or [self.message("", "", [])]
            messages[0]["logprobs"] = self._entries(piece)
        return [self._line(message) for message in messages if message]

    def _messages(self, deltas: Sequence[Delta]) -> list[dict[str, Any]]:
        messages = []
        for delta in deltas:
            if isinstance(delta, ToolCallArguments):
                assert self._call is not None, "arguments follow the start of their call"
                self._call.arguments += delta.text
                continue
            if last := self._end_call():
                messages.append(last)
            if isinstance(delta, ToolCallStart):
                self._call = ParsedCall(delta.id, delta.name, written=delta.written)
            elif isinstance(delta, Reasoning):
                messages.append(self.message("", delta.text, []))
            else:
                messages.append(self.message(delta.text, "", []))
        return messages

    def _end_call(self) -> dict[str, Any] | None:
        """Ends the open call. Returns the message with it, or None if no call is open."""
        call, self._call = self._call, None
        if call is None:
            return None
        written = _written_call(call, self._num_calls)
        if isinstance(written, str):
            return self.message(written, "", [])
        self._num_calls += 1
        return self.message("", "", [written])

    def end(self, choices: Choices) -> bytes:
        return self._line({**self.message("", "", []), **self._closing(choices.results[0])})

    def error(self, error: ApiError) -> bytes:
        return _encode(error_body(error)) + b"\n"

    def _line(self, fields: dict[str, Any]) -> bytes:
        return _encode({**head(self.context.model), "done": False, **fields}) + b"\n"

    def _text_line(self, text: str) -> bytes:
        """The most frequent line. Only its time and its text are encoded."""
        return self._before_time + _now().encode() + self._before_text + _encode(text) + self._after_text

    # ------------------------------------------------------------------ one body

    def keep(self, piece: Piece) -> int:
        if self._keeps_tokens:
            self._tokens += piece.tokens
        if not self._wants_logprobs or not piece.tokens:
            return 0
        encoded = _encode(self._entries(piece))[1:-1]
        self._logprobs += (b"," if self._logprobs else b"") + encoded
        return len(encoded)

    def answer(self, index: int, result: GenerationResult, answer: str | AnswerParts) -> tuple[bytes, bytes]:
        parts = AnswerParts([Content(answer)]) if isinstance(answer, str) else answer
        calls: list[dict[str, Any]] = []
        texts: list[str] = []
        for part in parts.parts:
            written = _written_call(part, len(calls)) if isinstance(part, ParsedCall) else part.text
            if not isinstance(written, str):
                calls.append(written)
            elif not isinstance(part, Reasoning):
                texts.append(written)
        message = self.message("".join(texts), parts.reasoning, calls)
        fields = {**head(self.context.model), **message, **self._closing(result)}
        if self._wants_logprobs:
            fields["logprobs"] = msgspec.Raw(b"[" + self._logprobs + b"]")
        return _encode(fields), b""

    def _closing(self, result: GenerationResult) -> dict[str, Any]:
        """The fields of the last line."""
        context = {"context": [*self.context.prompts[0], *self._tokens]} if self._keeps_tokens else {}
        total = result.waiting_time + result.prefill_time + result.decode_time
        return {
            "done": True,
            "done_reason": result.finish_reason.in_openai,
            **context,
            "total_duration": _nanoseconds(total),
            "load_duration": 0,
            "prompt_eval_count": result.prompt_token_count,
            "prompt_eval_duration": _nanoseconds(result.prefill_time),
            "eval_count": result.completion_token_count,
            "eval_duration": _nanoseconds(result.decode_time),
        }

    # ------------------------------------------------------------------ logprobs

    def _entries(self, piece: Piece) -> list[dict[str, Any]]:
        return [self._entry(*pair) for pair in zip(piece.tokens, piece.logprobs, strict=True)]

    def _entry(self, token: int, logprobs: TokenLogprobs) -> dict[str, Any]:
        entry = logprob_entry(token, logprobs, self._token_bytes)
        if not entry["top_logprobs"]:
            del entry["top_logprobs"]
        return entry


def _written_call(call: ParsedCall, index: int) -> dict[str, Any] | str:
    """A tool call in Ollama's form. If its arguments are no JSON object (it was cut, or the model wrote something
    else): its text, so that it is not lost."""
    try:
        is_object = isinstance(msgspec.json.decode(call.arguments), dict)
    except (ValueError, RecursionError):
        is_object = False
    if not is_object:
        return call.text
    # The arguments stay as the model wrote them, but on one line. In JSON, line breaks stand only between values.
    arguments = msgspec.Raw(call.arguments.replace("\n", " ").replace("\r", " ").encode())
    return {"id": call.id, "function": {"index": index, "name": call.name, "arguments": arguments}}


def _nanoseconds(seconds: float) -> int:
    return int(1e9 * seconds)
