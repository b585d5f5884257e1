"""The format of `/v1/chat/completions`: messages in, one message with thoughts and tool calls out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, UnsetType

from weft.request import GenerationResult, TokenLogprobs
from weft.server.api import structured
from weft.server.api.answer_format import (
    GENERATING,
    HELLO,
    AnswerContext,
    AnswerWriter,
    Operation,
    ParsedRequest,
    ServedModel,
)
from weft.server.api.chat_request import CHAT_FIELDS, ChatRequest, check_words, predicted_text, sampling_of
from weft.server.api.openai import EVENT_NOTE, OpenAIFormat, OpenAIWriter, includes_usage, parsed_request
from weft.server.api.requests import sampling_params
from weft.server.api.response_shapes import FinishReason, Shape, Timings, Usage
from weft.server.api.tool_use import is_named, tool_use
from weft.server.stream.choices import Choice, Choices, Piece
from weft.text.answer_parts import AnswerParts, Content, ParsedCall, Reasoning, ToolCallStart
from weft.text.answer_parts import Delta as AnswerDelta
from weft.text.conversation import Conversation
from weft.text.messages import items_of

# ---------------------------------------------------------------------- the types of requests and responses


class FunctionCall(Shape):
    name: str | UnsetType = UNSET
    arguments: Annotated[
        str | UnsetType, Meta(description="The arguments as JSON text, as the model wrote them.")
    ] = UNSET


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
    """One event of a chat stream."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | UnsetType | None = UNSET


_CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 40}},
    "required": ["city"],
    "additionalProperties": False,
}


class ChatFormat(OpenAIFormat[ChatRequest]):
    request_type = ChatRequest
    operation = Operation(
        "Chat completion",
        "The chat template turns the messages into a prompt. Control tokens inside messages are plain text.",
        "Generating",
        ChatCompletion,
        ChatRequest,
        ChatCompletionChunk,
        {
            "Question": {"messages": HELLO, "temperature": 0, "max_tokens": 64},
            "Stream": {
                "messages": HELLO,
                "stream": True,
                "stream_options": {"include_usage": True},
                "temperature": 0,
                "max_tokens": 64,
            },
            "With a seed": {"messages": HELLO, "temperature": 0.7, "seed": 7, "max_tokens": 64},
            "JSON schema": {
                "messages": [{"role": "user", "content": "Name a city."}],
                "response_format": {"type": "json_schema", "json_schema": {"name": "city", "schema": _CITY}},
                "temperature": 0,
                "max_tokens": 64,
            },
            "Tool call": {
                "messages": [{"role": "user", "content": "What is the weather in Rome?"}],
                "tools": [{"type": "function", "function": {"name": "weather", "parameters": _CITY}}],
                "tool_choice": "required",
                "temperature": 0,
                "max_tokens": 64,
            },
            "Logprobs": {"messages": HELLO, "logprobs": True, "top_logprobs": 3, "max_tokens": 4},
        },
        GENERATING,
        event_note=EVENT_NOTE,
    )
    fields = CHAT_FIELDS

    def parse(self, api_request: ChatRequest, model: ServedModel) -> ParsedRequest:
        params = sampling_params(api_request, model.generation_defaults, **sampling_of(api_request))
        grammar = structured.requested_grammar(api_request)
        check_words(api_request)
        tools = tool_use(api_request.tools or [], api_request.tool_choice, api_request.parallel_tool_calls)
        conversation = Conversation(
            items_of(api_request.messages),
            api_request.documents,
            api_request.chat_template_kwargs,
            continues_last=api_request.continue_final_message,
            opens_answer=api_request.add_generation_prompt,
            reasoning_effort=api_request.reasoning_effort,
        )
        prediction = predicted_text(api_request.prediction)
        return parsed_request(api_request, conversation, params, grammar, tools=tools, prediction=prediction)

    def writer(self, api_request: ChatRequest, context: AnswerContext) -> AnswerWriter:
        return ChatWriter(
            context,
            include_usage=includes_usage(api_request),
            is_named_call=is_named(api_request.tool_choice),
            has_prediction=api_request.prediction is not None,
        )

    def field_names(self, api_request: ChatRequest) -> Mapping[str, str]:
        names = {**super().field_names(api_request), "prompt": "messages"}
        if api_request.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
        if api_request.top_logprobs is not None:
            names["logprobs"] = "top_logprobs"
        return names


class ChatWriter(OpenAIWriter):
    id_prefix = "chatcmpl"
    answer_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    smallest_entry = 50

    def __init__(
        self,
        context: AnswerContext,
        *,
        include_usage: bool = False,
        is_named_call: bool = False,
        has_prediction: bool = False,
    ) -> None:
        """`is_named_call`: tool_choice names a function. The finish reason is then "stop", as in the OpenAI API."""
        super().__init__(context, include_usage=include_usage)
        self._has_prediction = has_prediction
        self._is_named_call = is_named_call
        self._token_bytes = context.tokenizer.token_bytes

    def opening(self, index: int) -> bytes:
        # Clients concatenate the contents of all events, so the first is "". None: there may be only tool calls.
        content = None if self.context.has_parts else ""
        return self.event(_choice(index, {"role": "assistant", "content": content}))

    def text(self, index: int, text: str, logprobs: dict[str, Any] | None = None) -> dict[str, Any]:
        return _choice(index, {"content": text}, logprobs)

    def pieces(self, piece: Piece) -> list[dict[str, Any]]:
        if piece.deltas is None:
            return super().pieces(piece)
        index = piece.choice.index
        choices: list[dict[str, Any]] = [
            {"index": index, "delta": _delta(delta), "logprobs": None, "finish_reason": None}
            for delta in piece.deltas
        ]
        if self._wants_logprobs and piece.tokens:
            # The first event of a piece has the logprobs of all its tokens, also of thoughts and tool calls.
            choices = choices or [_choice(index, {})]
            choices[0]["logprobs"] = self.logprobs(index, piece.tokens, piece.logprobs)
        return choices

    def closing(self, choice: Choice, result: GenerationResult) -> dict[str, Any]:
        return {**super().closing(choice, result), "delta": {}}

    def content(self, index: int, answer: str | AnswerParts) -> dict[str, Any]:
        return {"message": _message(answer)}

    def finish_reason(self, result: GenerationResult, has_calls: bool) -> str:
        reason = super().finish_reason(result, has_calls)
        is_call = has_calls and not self._is_named_call
        return "tool_calls" if is_call and reason == "stop" else reason

    def usage(self, choices: Choices) -> dict[str, Any]:
        usage = super().usage(choices)
        if self._has_prediction:
            results = choices.results
            usage["completion_tokens_details"] = {
                **usage.get("completion_tokens_details", {}),
                "accepted_prediction_tokens": sum(one.accepted_prediction_count for one in results),
                "rejected_prediction_tokens": sum(one.rejected_prediction_count for one in results),
            }
        return usage

    def logprobs(
        self, index: int, tokens: Sequence[int], token_logprobs: Sequence[TokenLogprobs | None]
    ) -> dict[str, list[Any]]:
        return {"content": [self._entry(*pair) for pair in zip(tokens, token_logprobs, strict=True)]}

    def _entry(self, token: int, logprobs: TokenLogprobs | None) -> dict[str, Any]:
        assert logprobs is not None, (
            "only the first token of an echoed prompt has no logprobs, and chats have no echo"
        )
        return {
            **self._token_entry(token, logprobs.logprob),
            "top_logprobs": [self._token_entry(*other) for other in logprobs.top],
        }

    def _token_entry(self, token: int, logprob: float) -> dict[str, Any]:
        content = self._token_bytes(token)
        return {"token": content.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(content)}


def _choice(index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}


def _message(answer: str | AnswerParts) -> dict[str, Any]:
    if isinstance(answer, str):
        return {"role": "assistant", "content": answer, "refusal": None}
    message: dict[str, Any] = {"role": "assistant", "content": answer.content, "refusal": None}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.calls:
        message["content"] = answer.content or None
        message["tool_calls"] = [_call(call) for call in answer.calls]
    return message


def _call(call: ParsedCall) -> dict[str, Any]:
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def _delta(delta: AnswerDelta) -> dict[str, Any]:
    if isinstance(delta, Content):
        return {"content": delta.text}
    if isinstance(delta, Reasoning):
        return {"reasoning_content": delta.text}
    if isinstance(delta, ToolCallStart):
        return {"tool_calls": [{"index": delta.index, **_call(ParsedCall(delta.id, delta.name))}]}
    return {"tool_calls": [{"index": delta.index, "function": {"arguments": delta.text}}]}
