"""What the formats of the OpenAI API share: the envelope of answers and chunks, usage, timings, finish reasons."""

from __future__ import annotations

import hashlib
import itertools
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import msgspec

from weft.request import MAX_NAME_LENGTH, GenerationResult, Grammar, SamplingParams
from weft.server.api import structured
from weft.server.api.answer_format import (
    AnswerContext,
    AnswerFormat,
    AnswerWriter,
    ParsedRequest,
    Prompt,
    around_text,
)
from weft.server.api.requests import priority_of
from weft.server.api.schema import GenerationRequest
from weft.server.errors import ApiError
from weft.server.stream.choices import Choice, Choices, Piece
from weft.text.answer_parts import AnswerParts
from weft.text.conversation import Conversation

EVENT_NOTE = (
    "Each `data:` line is one event with a JSON object of this type. The last one is `[DONE]` or an error."
)

_encode = msgspec.json.Encoder().encode
_NO_LOGPROBS = b'"logprobs":null'

G = TypeVar("G", bound=GenerationRequest)


class OpenAIFormat(AnswerFormat[G]):
    """Base of chat and completion."""

    def field_names(self, api_request: G) -> Mapping[str, str]:
        return {"grammar": structured.grammar_param(api_request)}


def parsed_request(
    api_request: GenerationRequest,
    prompt: Conversation | Sequence[Prompt],
    params: SamplingParams,
    grammar: Grammar | None,
    **more: Any,
) -> ParsedRequest:
    """A `ParsedRequest` with the fields that all these formats have. `more` are its other fields."""
    return ParsedRequest(
        prompt,
        params,
        api_request.stream,
        grammar,
        priority=priority_of(api_request),
        session_id=_session_of(api_request),
        ttft_target=api_request.ttft_target,
        deadline=api_request.deadline,
        cache_salt=api_request.cache_salt,
        learn_prompt=api_request.learn_prompt,
        **more,
    )


def _session_of(api_request: GenerationRequest) -> str | None:
    """The session id of a request: `session_id`, or else `prompt_cache_key`. A key that is too long for a session id is
    replaced by its hash."""
    key = api_request.prompt_cache_key
    if api_request.session_id is not None or not key or len(key) <= MAX_NAME_LENGTH:
        return api_request.session_id or key or None
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def includes_usage(api_request: GenerationRequest) -> bool:
    return api_request.stream_options is not None and bool(api_request.stream_options.include_usage)


class OpenAIWriter(AnswerWriter):
    """Writes choice objects. The JSON that all chunks of a stream have in common is encoded once."""

    id_prefix: ClassVar[str]
    answer_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(self, context: AnswerContext, *, include_usage: bool = False) -> None:
        super().__init__(context)
        self._include_usage = include_usage
        self._wants_logprobs = context.wants_logprobs
        before, after = _split(self.chunk([], usage=None) if include_usage else self.chunk([]))
        self._prefix, self._suffix = b"data: " + before, after + b"\n\n"
        self._opened: set[int] = set()
        self._ended: set[int] = set()
        self._around_text: dict[int, tuple[bytes, bytes]] = {}
        """By answer: the bytes before and after the text, in a chunk that has only text."""

    # ------------------------------------------------------------------ where the formats differ

    @abstractmethod
    def opening(self, index: int) -> bytes:
        """The events before the first token of an answer."""

    @abstractmethod
    def text(self, index: int, text: str, logprobs: dict[str, Any] | None = None) -> dict[str, Any]:
        """The choice object of a chunk with text only."""

    @abstractmethod
    def content(self, index: int, answer: str | AnswerParts) -> dict[str, Any]:
        """The field of a choice object that has the whole answer."""

    # ------------------------------------------------------------------ a stream

    def begin(self) -> bytes:
        return self._opening_once(0)

    def keep_alive(self) -> bytes:
        # An answer has no events after its finish reason. So this uses the first answer that has not ended.
        index = next(index for index in itertools.count() if index not in self._ended)
        return self._opening_once(index) + self.text_event(index, "")

    def _opening_once(self, index: int) -> bytes:
        if index in self._opened:
            return b""
        self._opened.add(index)
        return self.opening(index)

    def events(self, pieces: Sequence[Piece]) -> bytes:
        events: list[bytes] = []
        for piece in pieces:
            choice = piece.choice
            index = choice.index
            if index not in self._opened:
                events.append(self._opening_once(index))
            if piece.deltas is not None or self._wants_logprobs:
                events += map(self.event, self.pieces(piece))
            elif piece.text:
                events.append(self.text_event(index, piece.text))
            if choice.result is not None:
                self._ended.add(index)
                events.append(self.event(self.closing(choice, choice.result)))
        return events[0] if len(events) == 1 else b"".join(events)

    def end(self, choices: Choices) -> bytes:
        usage = b""
        if self._include_usage:
            usage = _event(self.chunk([], usage=self.usage(choices)))
        return usage + b"data: [DONE]\n\n"

    def error(self, error: ApiError) -> bytes:
        return _event(error.body)

    def event(self, choice: dict[str, Any]) -> bytes:
        """The event of a chunk with one choice object."""
        return self._prefix + _encode(choice) + self._suffix

    def text_event(self, index: int, text: str) -> bytes:
        """The same bytes as `event(text(index, text))`, but much faster."""
        around = self._around_text.get(index)
        if around is None:
            around = self._around_text[index] = around_text(self.event(self.text(index, "")))
        return around[0] + _encode(text) + around[1]

    def chunk(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {**self._envelope(self.chunk_object, choices), **more}

    def pieces(self, piece: Piece) -> list[dict[str, Any]]:
        """The choice objects for a piece."""
        index, logprobs = piece.choice.index, None
        if self._wants_logprobs and piece.tokens:
            logprobs = self.logprobs(index, piece.tokens, piece.logprobs)
        return [self.text(index, piece.text, logprobs)] if piece.text or logprobs else []

    def closing(self, choice: Choice, result: GenerationResult) -> dict[str, Any]:
        """The choice object of the last chunk of an answer, with the finish reason."""
        return {
            **self.text(choice.index, ""),
            "finish_reason": self.finish_reason(result, choice.has_calls),
            "timings": _timings(result),
        }

    # ------------------------------------------------------------------ one body

    def envelope(self, choices: Choices) -> tuple[bytes, bytes]:
        return _split({**self._envelope(self.answer_object, []), "usage": self.usage(choices)})

    def answer(self, index: int, result: GenerationResult, answer: str | AnswerParts) -> tuple[bytes, bytes]:
        has_calls = not isinstance(answer, str) and bool(answer.calls)
        encoded = _encode(
            {
                "index": index,
                **self.content(index, answer),
                "logprobs": None,
                "finish_reason": self.finish_reason(result, has_calls),
                "timings": _timings(result),
            }
        )
        if not self._wants_logprobs:
            return encoded, b""
        # _NO_LOGPROBS cannot occur in a text: its quotes would be escaped there.
        before, after = encoded.rsplit(_NO_LOGPROBS, 1)
        return before + b'"logprobs":', after

    def usage(self, choices: Choices) -> dict[str, Any]:
        """The usage of all answers. A prompt counts once for all its answers."""
        results = choices.results
        details: dict[str, Any] = {}
        if self.context.has_parts:
            details["completion_tokens_details"] = {"reasoning_tokens": choices.num_reasoning_tokens}
        firsts = results[:: self.context.num_choices_per_prompt]
        prompt = sum(result.prompt_token_count for result in firsts)
        completion = sum(result.completion_token_count for result in results)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(result.cached_token_count for result in firsts)},
            **details,
        }

    def finish_reason(self, result: GenerationResult, has_calls: bool) -> str:
        return result.finish_reason.in_openai

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"{self.id_prefix}-{self.context.request_id}",
            "object": kind,
            "created": self.context.created,
            "model": self.context.model,
            "choices": choices,
        }


def _split(content: dict[str, Any]) -> tuple[bytes, bytes]:
    """Splits the JSON of `content` inside its empty list of choices."""
    whole = _encode(content)
    split = whole.rindex(b"[]") + 1  # no other list follows the choices
    return whole[:split], whole[split:]


def _event(content: Any) -> bytes:
    return b"data: " + _encode(content) + b"\n\n"


def _timings(result: GenerationResult) -> dict[str, Any]:
    """The seconds and tokens of one answer; an extension of weft. `usage` counts the tokens of all answers together."""
    return {
        "queue": result.waiting_time,
        "prefill": result.prefill_time,
        "decode": result.decode_time,
        "preemptions": result.preemptions,
        "completion_tokens": result.completion_token_count,
    }
