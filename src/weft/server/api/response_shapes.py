"""The shapes of what the server answers, for the OpenAPI document and for the tests that hold answers to them.

Answers themselves are built as plain dicts, in `openai`: these types are never made on the way to a client.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

FinishReason = Literal["stop", "length", "tool_calls"]


class Shape(msgspec.Struct, forbid_unknown_fields=True):
    """What all have in common: a field that is not described is a mistake."""


class ErrorDetail(Shape):
    message: Annotated[str, Meta(description="What was wrong, with the numbers, and what to do.")]
    type: Annotated[str, Meta(description="The kind of error, such as invalid_request_error.")]
    param: Annotated[str | None, Meta(description="The field that is wrong.")]
    code: Annotated[str | None, Meta(description="For programs, such as context_length_exceeded.")]


class Error(Shape):
    """What every request that fails gets; in a stream as its last event."""

    error: ErrorDetail


class TokenDetails(Shape):
    cached_tokens: Annotated[int, Meta(description="Of the prompt, found in the cache.")]


class CompletionDetails(Shape):
    reasoning_tokens: int = 0


class Usage(Shape):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: TokenDetails
    completion_tokens_details: CompletionDetails | UnsetType = UNSET


class Timings(Shape):
    """Seconds in each phase, and how often it gave way; weft's own."""

    queue: float
    prefill: float
    decode: float
    preemptions: int


class FunctionCall(Shape):
    name: str | UnsetType = UNSET
    arguments: Annotated[str | UnsetType, Meta(description="JSON, as the model wrote it.")] = UNSET


class ToolCall(Shape):
    function: FunctionCall
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    index: int | UnsetType = UNSET


class TopLogprob(Shape):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(Shape):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Shape):
    content: list[TokenLogprob]


class AnswerMessage(Shape):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | UnsetType | None = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(Shape):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    timings: Timings


class ChatCompletion(Shape):
    id: str
    object: Literal["chat.completion"]
    created: Annotated[int, Meta(description="Seconds since 1970.")]
    model: str
    choices: list[ChatChoice]
    usage: Usage


class Delta(Shape):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType | None = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChunkChoice(Shape):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    timings: Timings | UnsetType = UNSET


class ChatCompletionChunk(Shape):
    """One event of a streamed chat."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | UnsetType | None = UNSET


class CompletionLogprobs(Shape):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Shape):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    timings: Timings | UnsetType = UNSET


class Completion(Shape):
    """A completion, whole or one event of it."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


class Model(Shape):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: Annotated[int, Meta(description="Longest context in tokens, prompt and answer.")]


class ModelList(Shape):
    object: Literal["list"]
    data: list[Model]


class Tokens(Shape):
    count: int
    max_model_len: int
    tokens: list[int]


class Detokenized(Shape):
    prompt: str


class TokenizerInfo(Shape):
    bos_token: str | None
    eos_token: str | None
    unk_token: str | None
    pad_token: str | None
    vocab_size: int


class Status(Shape):
    status: str


class Version(Shape):
    version: str
