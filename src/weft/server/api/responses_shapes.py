"""The types of responses of the Responses API, for the OpenAPI document and for tests that compare responses with it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from weft.server.api.listing import Page
from weft.server.api.response_shapes import Shape

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class ResponseError(Shape):
    code: Annotated[
        str, Meta(description="server_error, rate_limit_exceeded, context_length_exceeded, invalid_prompt.")
    ]
    message: str


class IncompleteDetails(Shape):
    reason: Literal["max_output_tokens"]


class InputTokensDetails(Shape):
    cached_tokens: Annotated[int, Meta(description="Input tokens that were found in the prefix cache.")]
    cache_write_tokens: Annotated[
        int,
        Meta(description="Input tokens that the same request would find in the cache and this one did not."),
    ]


class OutputTokensDetails(Shape):
    reasoning_tokens: int


class ResponseUsage(Shape):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class OutputText(Shape):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[dict[str, Any]]


class _OutputItem(msgspec.Struct, forbid_unknown_fields=True, tag_field="type"):
    id: str
    status: Literal["in_progress", "completed", "incomplete"]


class MessageItem(_OutputItem, tag="message"):
    role: Literal["assistant"]
    content: list[OutputText]


class ReasoningItem(_OutputItem, tag="reasoning"):
    summary: list[dict[str, Any]]
    content: list[dict[str, Any]] | UnsetType = UNSET
    encrypted_content: str | None = None


class FunctionCallItem(_OutputItem, tag="function_call"):
    call_id: str
    name: str
    arguments: str
    namespace: str | UnsetType = UNSET


class FileSearchItem(_OutputItem, tag="file_search_call"):
    queries: list[str]
    results: Annotated[
        list[dict[str, Any]] | None, Meta(description="With `file_search_call.results` in include.")
    ] = None


class CustomToolCallItem(_OutputItem, tag="custom_tool_call"):
    call_id: str
    name: str
    input: str
    namespace: str | UnsetType = UNSET


class ResponseObject(Shape):
    id: str
    object: Literal["response"]
    created_at: Annotated[int, Meta(description="Seconds since 1970.")]
    status: Status
    completed_at: int | None
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    store: bool
    usage: ResponseUsage | None
    output: list[MessageItem | ReasoningItem | FunctionCallItem | FileSearchItem | CustomToolCallItem]
    background: bool
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: dict[str, Any]
    safety_identifier: str | None
    service_tier: str
    temperature: float | None
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float | None
    truncation: Literal["auto", "disabled"]
    user: str | None


class ResponseEvent(Shape):
    """One event of a stream. Which fields it has depends on its type."""

    type: Annotated[str, Meta(description="Such as response.created, response.output_text.delta.")]
    sequence_number: int
    response: ResponseObject | UnsetType = UNSET
    item: MessageItem | ReasoningItem | FunctionCallItem | FileSearchItem | CustomToolCallItem | UnsetType = (
        UNSET
    )
    part: dict[str, Any] | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    summary_index: int | UnsetType = UNSET
    annotation: dict[str, Any] | UnsetType = UNSET
    annotation_index: int | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    input: str | UnsetType = UNSET
    logprobs: list[dict[str, Any]] | UnsetType = UNSET


class DeletedResponse(Shape):
    id: str
    object: Literal["response"]
    deleted: bool


class InputItems(Page):
    data: list[dict[str, Any]]


class ResponseInputTokens(Shape):
    object: Literal["response.input_tokens"]
    input_tokens: int
