"""The format of `/v1/chat/completions`: messages in, one message with thoughts and tool calls out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, UnsetType
from msgspec.structs import replace

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
from weft.server.api.chat_request import (
    CHAT_FIELDS,
    ChatRequest,
    LoadedChat,
    check_words,
    predicted_text,
    sampling_of,
)
from weft.server.api.chat_tools import chat_tools, custom_names, is_named
from weft.server.api.file_search import FileSearch, is_file_search, planned_search, with_passages
from weft.server.api.logprob_entries import TokenLogprob, logprob_entry
from weft.server.api.openai import EVENT_NOTE, OpenAIFormat, OpenAIWriter, includes_usage, parsed_request
from weft.server.api.requests import sampling_params
from weft.server.api.response_shapes import FinishReason, Shape, Timings, Usage
from weft.server.api.services import Caller
from weft.server.stream.choices import Choice, Choices, Piece
from weft.text.answer_parts import AnswerParts, Content, ParsedCall, Reasoning, ToolCallArguments
from weft.text.conversation import Conversation
from weft.text.custom_calls import custom_input
from weft.text.messages import items_of

# ---------------------------------------------------------------------- the types of requests and responses


class FunctionCall(Shape):
    name: str | UnsetType = UNSET
    arguments: Annotated[
        str | UnsetType, Meta(description="The arguments as JSON text, as the model wrote them.")
    ] = UNSET


class CustomCall(Shape):
    name: str | UnsetType = UNSET
    input: str | UnsetType = UNSET


class ToolCall(Shape):
    function: FunctionCall | UnsetType = UNSET
    custom: CustomCall | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: Literal["function", "custom"] | UnsetType = UNSET
    index: int | UnsetType = UNSET


class ChatLogprobs(Shape):
    content: list[TokenLogprob]


class FileCitation(Shape):
    type: Literal["file_citation"]
    index: Annotated[int, Meta(description="Characters of the content before the citation.")]
    file_id: str
    filename: str


class AnswerMessage(Shape):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | UnsetType | None = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET
    annotations: Annotated[
        list[FileCitation] | UnsetType, Meta(description="With the tool file_search, an extension.")
    ] = UNSET


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
    annotations: list[FileCitation] | UnsetType = UNSET


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

    async def load(self, api_request: ChatRequest, caller: Caller) -> ChatRequest:
        tools = api_request.tools or ()
        if not any(map(is_file_search, tools)):
            return api_request
        items = items_of(api_request.messages)
        search = await planned_search(tools, api_request.tool_choice, items, caller)
        if search is None:
            return api_request
        values = {name: getattr(api_request, name) for name in api_request.__struct_fields__}
        return LoadedChat(**values, search=search)

    async def search(self, api_request: ChatRequest, caller: Caller) -> ChatRequest:
        assert isinstance(api_request, LoadedChat)
        return replace(api_request, search=await api_request.search.with_sources(caller))

    def parse(self, api_request: ChatRequest, model: ServedModel) -> ParsedRequest:
        params = sampling_params(api_request, model.generation_defaults, **sampling_of(api_request))
        grammar = structured.requested_grammar(api_request)
        check_words(api_request)
        tools = chat_tools(api_request.tools or [], api_request.tool_choice, api_request.parallel_tool_calls)
        search = _search_of(api_request)
        conversation = Conversation(
            with_passages(items_of(api_request.messages), search),
            api_request.documents,
            api_request.chat_template_kwargs,
            continues_last=api_request.continue_final_message,
            opens_answer=api_request.add_generation_prompt,
            reasoning_effort=api_request.reasoning_effort,
        )
        prediction = predicted_text(api_request.prediction)
        return parsed_request(
            api_request,
            conversation,
            params,
            grammar,
            tools=tools,
            prediction=prediction,
            is_search_pending=search is not None and search.is_pending,
        )

    def writer(self, api_request: ChatRequest, context: AnswerContext) -> AnswerWriter:
        return ChatWriter(
            context,
            include_usage=includes_usage(api_request),
            is_named_call=is_named(api_request.tool_choice),
            custom_tools=custom_names(api_request.tools or ()),
            has_prediction=api_request.prediction is not None,
            search=_search_of(api_request),
        )

    def field_names(self, api_request: ChatRequest) -> Mapping[str, str]:
        names = {**super().field_names(api_request), "prompt": "messages"}
        if api_request.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
        if api_request.top_logprobs is not None:
            names["logprobs"] = "top_logprobs"
        return names


def _search_of(api_request: ChatRequest) -> FileSearch | None:
    return api_request.search if isinstance(api_request, LoadedChat) else None


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
        custom_tools: frozenset[str] = frozenset(),
        search: FileSearch | None = None,
    ) -> None:
        """`is_named_call`: tool_choice names a tool. The finish reason is then "stop", as in the OpenAI API."""
        super().__init__(context, include_usage=include_usage)
        self._has_prediction = has_prediction
        self._is_named_call = is_named_call
        self._token_bytes = context.tokenizer.token_bytes
        self._custom_tools = custom_tools
        self._search = search
        self._texts: dict[int, list[str]] = {}
        """Answer -> its content so far. Only a file search needs it, to find citations."""
        self._custom_calls: dict[int, tuple[int, list[str]]] = {}
        """Answer -> the index of its open call of a custom tool, and the arguments so far."""

    def prompt_is_ready(self, api_request: ChatRequest, context: AnswerContext) -> None:
        super().prompt_is_ready(api_request, context)
        self._search = _search_of(api_request)

    def opening(self, index: int) -> bytes:
        # Clients concatenate the contents of all events, so the first is "". It is None if there may be only tool calls.
        content = None if self.context.has_parts else ""
        return self.event(_choice(index, {"role": "assistant", "content": content}))

    def text(self, index: int, text: str, logprobs: dict[str, Any] | None = None) -> dict[str, Any]:
        return _choice(index, {"content": text}, logprobs)

    def events(self, pieces: Sequence[Piece]) -> bytes:
        if self._search is not None:
            for piece in pieces:
                contents = (one.text for one in piece.deltas or () if isinstance(one, Content))
                text = piece.text if piece.deltas is None else "".join(contents)
                self._texts.setdefault(piece.choice.index, []).append(text)
        return super().events(pieces)

    def pieces(self, piece: Piece) -> list[dict[str, Any]]:
        if piece.deltas is None:
            return super().pieces(piece)
        index = piece.choice.index
        choices = [_choice(index, delta) for delta in self._deltas(piece)]
        if self._wants_logprobs and piece.tokens:
            # The first event of a piece has the logprobs of all its tokens, also of thoughts and tool calls.
            choices = choices or [_choice(index, {})]
            choices[0]["logprobs"] = self.logprobs(index, piece.tokens, piece.logprobs)
        return choices

    def closing(self, choice: Choice, result: GenerationResult) -> dict[str, Any]:
        delta = {}
        if self._search is not None:
            delta["annotations"] = self._search.annotations("".join(self._texts.get(choice.index, ())))
        return {**super().closing(choice, result), "delta": delta}

    def content(self, index: int, answer: str | AnswerParts) -> dict[str, Any]:
        message = self._message(answer)
        if self._search is not None:
            message["annotations"] = self._search.annotations(message["content"] or "")
        return {"message": message}

    def _deltas(self, piece: Piece) -> Iterator[dict[str, Any]]:
        """The deltas of a piece. The input of a custom tool is sent as one delta when the call is complete. The model writes
        it as a string inside JSON, which can only be decoded as a whole."""
        index = piece.choice.index
        for delta in piece.deltas or ():
            if isinstance(delta, ToolCallArguments):
                if index in self._custom_calls:
                    self._custom_calls[index][1].append(delta.text)
                else:
                    yield {"tool_calls": [{"index": delta.index, "function": {"arguments": delta.text}}]}
                continue
            yield from self._end_custom_call(index)
            if isinstance(delta, Content):
                yield {"content": delta.text}
            elif isinstance(delta, Reasoning):
                yield {"reasoning_content": delta.text}
            else:
                if delta.name in self._custom_tools:
                    self._custom_calls[index] = delta.index, []
                yield {"tool_calls": [{"index": delta.index, **self._call(ParsedCall(delta.id, delta.name))}]}
        if piece.choice.result is not None:
            yield from self._end_custom_call(index)

    def _end_custom_call(self, index: int) -> Iterator[dict[str, Any]]:
        if index in self._custom_calls:
            number, arguments = self._custom_calls.pop(index)
            yield {"tool_calls": [{"index": number, "custom": {"input": custom_input("".join(arguments))}}]}

    def _message(self, answer: str | AnswerParts) -> dict[str, Any]:
        if isinstance(answer, str):
            return {"role": "assistant", "content": answer, "refusal": None}
        message: dict[str, Any] = {"role": "assistant", "content": answer.content, "refusal": None}
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        if answer.calls:
            message["content"] = answer.content or None
            message["tool_calls"] = [self._call(call) for call in answer.calls]
        return message

    def _call(self, call: ParsedCall) -> dict[str, Any]:
        if call.name in self._custom_tools:
            fields = {"name": call.name, "input": custom_input(call.arguments)}
            return {"id": call.id, "type": "custom", "custom": fields}
        function = {"name": call.name, "arguments": call.arguments}
        return {"id": call.id, "type": "function", "function": function}

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
        entries = []
        for token, one in zip(tokens, token_logprobs, strict=True):
            assert one is not None, (
                "only the first token of an echoed prompt has none, and chats have no echo"
            )
            entries.append(logprob_entry(token, one, self._token_bytes))
        return {"content": entries}


def _choice(index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}
