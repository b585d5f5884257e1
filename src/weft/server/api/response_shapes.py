"""The types of responses, for the OpenAPI document and for tests that compare responses with it. A type that only one
API format has is in the file of that format.

The server builds responses as plain dicts, and never creates instances of these types.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

FinishReason = Literal["stop", "length", "tool_calls"]


class Shape(msgspec.Struct, forbid_unknown_fields=True):
    """Base of all response types. Tests fail on a field that is not described."""


class ErrorDetail(Shape):
    message: Annotated[str, Meta(description="What is wrong, the value and the limit, and what to do.")]
    type: Annotated[str, Meta(description="The class of the error, such as invalid_request_error.")]
    param: Annotated[str | None, Meta(description="The field of the request that caused the error.")]
    code: Annotated[
        str | None, Meta(description="A stable code for programs, such as context_length_exceeded.")
    ]


class Error(Shape):
    """The body of every failed request; in a stream, the last event."""

    error: ErrorDetail


class TokenDetails(Shape):
    cached_tokens: Annotated[int, Meta(description="Prompt tokens that were found in the prefix cache.")]


class CompletionDetails(Shape):
    reasoning_tokens: int = 0
    accepted_prediction_tokens: Annotated[
        int | UnsetType, Meta(description="Draft tokens from the prediction that are part of the answer.")
    ] = UNSET
    rejected_prediction_tokens: Annotated[
        int | UnsetType, Meta(description="Draft tokens from the prediction that were computed and rejected.")
    ] = UNSET


class Usage(Shape):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: TokenDetails
    completion_tokens_details: CompletionDetails | UnsetType = UNSET


class Timings(Shape):
    """Seconds in each phase, the number of preemptions, and the tokens of this answer. An extension of weft."""

    queue: float
    prefill: float
    decode: float
    preemptions: int
    completion_tokens: int


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
    models: Annotated[
        dict[str, str] | UnsetType,
        Meta(description="With several models: the state of the engine of each: starting, ready, stopped."),
    ] = UNSET


class Version(Shape):
    version: str
