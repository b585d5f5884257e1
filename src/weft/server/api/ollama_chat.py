"""The format of Ollama's `/api/chat`: messages in, one message with thoughts and tool calls out."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from weft.server.api.answer_format import (
    GENERATING,
    HELLO,
    AnswerContext,
    AnswerWriter,
    Operation,
    ParsedRequest,
    ServedModel,
)
from weft.server.api.field_docs import Field
from weft.server.api.ollama import (
    EVENT_NOTE,
    FIELDS,
    TAG,
    OllamaAnswer,
    OllamaError,
    OllamaFormat,
    OllamaRequest,
    parsed_request,
    refuse_images,
    template_options,
)
from weft.server.api.ollama_writer import STREAM_TYPE, OllamaWriter
from weft.server.api.response_shapes import Shape
from weft.server.api.schema import MAX_ENTRIES, converted
from weft.server.api.tool_use import FunctionTool, ToolChoice, chosen_tools
from weft.text.conversation import Conversation, Item, Message, Thought, ToolCall, ToolResult

# ---------------------------------------------------------------------- the types of requests and responses


class OllamaChatRequest(OllamaRequest, frozen=True, kw_only=True):
    messages: list[dict[str, Any]] = msgspec.field(default_factory=list)
    tools: list[dict[str, Any]] | None = None


class GivenFunction(msgspec.Struct, frozen=True):
    name: str
    arguments: dict[str, Any] | None = None


class GivenCall(msgspec.Struct, frozen=True):
    function: GivenFunction
    id: str | None = None


class GivenMessage(msgspec.Struct, frozen=True):
    """A message of a request."""

    role: str
    content: str | None = None
    thinking: str | None = None
    images: list[Any] | None = None
    tool_calls: list[GivenCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class CalledFunction(Shape):
    index: int
    name: str
    arguments: dict[str, Any]


class OllamaCall(Shape):
    id: str
    function: CalledFunction


class OllamaMessage(Shape):
    role: Literal["assistant"]
    content: str
    thinking: str | UnsetType = UNSET
    tool_calls: Annotated[
        list[OllamaCall] | UnsetType,
        Meta(description="A call is whole. If its arguments were cut, its text is in the content."),
    ] = UNSET


class OllamaChatAnswer(OllamaAnswer, kw_only=True):
    """An answer, or one line of a stream."""

    message: OllamaMessage


_WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}


class OllamaChatFormat(OllamaFormat[OllamaChatRequest]):
    request_type = OllamaChatRequest
    operation = Operation(
        "Chat in Ollama's API",
        "Streams lines of JSON unless `stream` is false. Without messages nothing is generated.",
        TAG,
        OllamaChatAnswer,
        OllamaChatRequest,
        OllamaChatAnswer,
        {
            "Question": {
                "messages": HELLO,
                "stream": False,
                "options": {"temperature": 0, "num_predict": 64},
            },
            "Stream": {"messages": HELLO, "stream": True, "options": {"num_predict": 64}},
            "JSON": {"messages": HELLO, "stream": False, "format": "json", "options": {"num_predict": 64}},
            "Tools": {
                "messages": HELLO,
                "stream": False,
                "tools": [_WEATHER],
                "options": {"num_predict": 64},
            },
        },
        GENERATING,
        event_note=EVENT_NOTE,
        event_media_type=STREAM_TYPE,
        error=OllamaError,
    )
    fields: Mapping[str, Field] = {
        **FIELDS,
        "messages": Field(
            f"The messages of the conversation, oldest first; at most {MAX_ENTRIES['messages']}. Each has role, content, "
            "and may have thinking, tool_calls, tool_name, tool_call_id. images must be empty.",
        ),
    }

    def content(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text}}

    def is_load_request(self, api_request: OllamaChatRequest) -> bool:
        return not api_request.messages

    def parse(self, api_request: OllamaChatRequest, model: ServedModel) -> ParsedRequest:
        given = converted(api_request.messages, list[GivenMessage], "messages")
        tools = chosen_tools(
            [_tool(tool, f"tools[{index}]") for index, tool in enumerate(api_request.tools or ())],
            ToolChoice(),
            None,
        )
        conversation = Conversation(items_of(given), template_options=template_options(api_request, model))
        return parsed_request(api_request, conversation, model, tools=tools)

    def writer(self, api_request: OllamaChatRequest, context: AnswerContext) -> AnswerWriter:
        return OllamaChatWriter(context)

    def field_names(self, api_request: OllamaChatRequest) -> Mapping[str, str]:
        return {**super().field_names(api_request), "prompt": "messages", "chat_template_kwargs": "think"}


class OllamaChatWriter(OllamaWriter):
    def message(self, text: str, thought: str, calls: Sequence[dict[str, Any]]) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant"}
        if thought:
            message["thinking"] = thought
        if calls:
            message["tool_calls"] = calls
        return {"message": {**message, "content": text}}


def _tool(tool: dict[str, Any], where: str) -> FunctionTool:
    """A tool of a request. It may leave out its type, which is always function."""
    function = tool.get("function")
    fields = function if isinstance(function, dict) else {}
    return FunctionTool(
        fields.get("name"),
        fields.get("description"),
        fields.get("parameters"),
        None,
        f"{where}.function",
    )


def items_of(messages: Sequence[GivenMessage]) -> list[Item]:
    """The items of a conversation. Clients may leave out the ids of calls and results, but some templates need them. A call
    gets an id from its position. A result gets the id of the first call of its tool that has no result yet."""
    items: list[Item] = []
    open_calls = _OpenCalls()
    for index, message in enumerate(messages):
        refuse_images(message.images, f"messages[{index}].images")
        if message.role == "tool":
            name = {} if message.tool_name is None else {"name": message.tool_name}
            call_id = message.tool_call_id or open_calls.take(message.tool_name)
            items.append(ToolResult(call_id, message.content or "", name))
            continue
        if message.role == "assistant" and message.thinking:
            items.append(Thought(message.thinking))
        calls = message.tool_calls or ()
        items.append(Message(message.role, None if calls and not message.content else message.content or ""))
        for number, call in enumerate(calls):
            arguments = msgspec.json.encode(call.function.arguments or {}).decode()
            given = ToolCall(call.id or f"call_{index}_{number}", call.function.name, arguments)
            open_calls.add(given)
            items.append(given)
    return items


class _OpenCalls:
    """The calls without a result. Each is visited at most twice: a body may have thousands of calls and results."""

    def __init__(self) -> None:
        self._ids: dict[int, str | None] = {}
        """Position of a call in the conversation -> the id of the call."""
        self._positions: dict[str | None, deque[int]] = {None: deque()}
        """Tool -> positions of its calls, in order; None -> positions of all calls. `take` skips positions that are no longer
        in `_ids`."""
        self._count = 0

    def add(self, call: ToolCall) -> None:
        self._ids[self._count] = call.id
        for name in (None, call.name):
            self._positions.setdefault(name, deque()).append(self._count)
        self._count += 1

    def take(self, tool_name: str | None) -> str | None:
        """The id of the call that a result belongs to. None if there is no such call."""
        positions = self._positions.get(tool_name)
        while positions:
            if (position := positions.popleft()) in self._ids:
                return self._ids.pop(position)
        return None
