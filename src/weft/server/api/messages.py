"""The format of `/v1/messages`, the Anthropic Messages API: how its requests and errors are read and written."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from weft.request import MAX_TOKENS, Grammar, SamplingParams
from weft.server.api import structured
from weft.server.api.answer_format import (
    GENERATING,
    HELLO,
    AnswerContext,
    AnswerFormat,
    AnswerWriter,
    Counting,
    Operation,
    ParsedRequest,
    ServedModel,
)
from weft.server.api.field_docs import Field
from weft.server.api.messages_input import ignored_blocks, items_of_messages, quoted
from weft.server.api.messages_writer import (
    UNSUPPORTED_THREAD,
    ErrorBody,
    InputTokens,
    MessageAnswer,
    MessagesWriter,
    StreamEvent,
    error_body,
)
from weft.server.api.schema import MAX_ENTRIES, MAX_NAMED, shown
from weft.server.api.tool_use import FunctionTool, ToolChoice, ToolUse, chosen_tools
from weft.server.errors import ApiError, refusal
from weft.text.conversation import EFFORTS, Conversation, Item, Message

_CHOICES = {"auto": "auto", "any": "required", "tool": "required", "none": "none"}
_DEFAULT_EFFORT = "high"
"""The effort of a request with thinking and without an effort, as in the Anthropic API."""
_WEATHER = {
    "name": "weather",
    "description": "The weather in a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 40}},
        "required": ["city"],
    },
}


class MessagesRequest(msgspec.Struct, frozen=True, kw_only=True):
    messages: list[dict[str, Any]]
    model: str | None = None
    max_tokens: int | None = None
    system: str | list[Any] | None = None
    stream: bool = False
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    cache_control: dict[str, Any] | None = None
    # Extensions of weft.
    seed: int | None = None
    deadline: float | None = None
    session_id: str | None = None
    cache_salt: str = ""
    learn_prompt: bool = False
    # Refused.
    thread: dict[str, Any] | None = None
    # Accepted without effect.
    service_tier: str | None = None


class MessagesFormat(AnswerFormat[MessagesRequest]):
    request_type = MessagesRequest
    family = "/v1/messages"
    client_header = b"anthropic-version"
    id_header = "request-id"
    operation = Operation(
        "Message",
        "The Anthropic Messages API. Beta headers are ignored.",
        "Generating",
        MessageAnswer,
        MessagesRequest,
        StreamEvent,
        {
            "Question": {"messages": HELLO, "temperature": 0, "max_tokens": 64},
            "Stream": {"messages": HELLO, "stream": True, "temperature": 0, "max_tokens": 64},
            "Tool call": {
                "messages": [{"role": "user", "content": "What is the weather in Rome?"}],
                "tools": [_WEATHER],
                "tool_choice": {"type": "any"},
                "temperature": 0,
                "max_tokens": 64,
            },
        },
        GENERATING,
        event_note="Each event has an `event:` line with its type. The last one is `message_stop` or `error`.",
        error=ErrorBody,
    )
    fields: Mapping[str, Field] = {
        "messages": Field(
            f"The messages, oldest first; at most {MAX_ENTRIES['messages']}. The content is a text or a list of blocks: "
            "text, tool_use, tool_result, thinking, redacted_thinking, document (text), search_result. An answer continues "
            "a last message of the assistant."
        ),
        "system": Field("The system prompt: a text, or a list of text blocks."),
        "max_tokens": Field(
            "Maximum number of generated tokens. It is lowered to what the context has left. Default: all of that.",
            1,
            MAX_TOKENS,
        ),
        "stream": Field("Send the answer as server-sent events while it is generated."),
        "stop_sequences": Field(
            f"Texts that end the answer. It ends before the first one. At most {MAX_ENTRIES['stop_sequences']}."
        ),
        "tools": Field(
            "Tools that the client runs, each with a name, a description and an input_schema. Tools with another type than "
            f"custom are ignored, and named in a Warning header. At most {MAX_ENTRIES['tools']}."
        ),
        "tool_choice": Field(
            'An object with the type auto, any, tool (with a name) or none. `"disable_parallel_tool_use": true` allows '
            "one call in an answer."
        ),
        "thinking": Field(
            "An object with the type enabled, adaptive or disabled: whether a model with a switch for thoughts thinks. "
            "Default: disabled, unless output_config has an effort. Budgets have no effect."
        ),
        "output_config": Field(
            "`format`: a json_schema that the answer follows. `effort`: how much the model should think, if its chat "
            f"template has levels: {', '.join(EFFORTS)}."
        ),
        "thread": Field(
            "Refused with `thread_unsupported_request`, at which the official package for Node sends all messages."
        ),
        "metadata": Field("`user_id` is part of the id of the session, if the request has a cache_control."),
        "cache_control": Field(
            "Here or in any block: keep the cached prefix of this conversation longer, as with a session_id."
        ),
    }
    counting = Counting(
        "/v1/messages/count_tokens",
        MessagesRequest,
        lambda count: {"input_tokens": count},
        Operation(
            "Count the tokens of a message",
            "The same number as the usage of the request: its input_tokens and both numbers of the cache together.",
            "Text",
            InputTokens,
            MessagesRequest,
            examples={"Question": {"messages": HELLO}},
            errors=(400, 404, 408, 413, 429, 500, 503),
            error=ErrorBody,
        ),
    )

    def ignored(self, api_request: MessagesRequest) -> Sequence[str]:
        kinds = [tool.get("type") for tool in api_request.tools or () if not _is_own(tool)]
        found = [f"tools.{kind if isinstance(kind, str) else 'unknown'}" for kind in kinds]
        found += (f"messages.{kind}" for kind in ignored_blocks(api_request.messages))
        return [shown(name) for name in found[:MAX_NAMED]]

    def parse(self, api_request: MessagesRequest, model: ServedModel) -> ParsedRequest:
        if api_request.thread is not None:
            raise refusal(
                "thread is not supported: this API keeps no conversation on the server; leave it out and send all messages",
                "thread",
                UNSUPPORTED_THREAD,
            )
        items, continues_last = items_of_messages(api_request.system, api_request.messages)
        session_id = api_request.session_id
        if session_id is None and _has_mark(api_request):
            session_id = _session_id(items, api_request.metadata)
        return ParsedRequest(
            Conversation(items, continues_last=continues_last, reasoning_effort=_effort(api_request)),
            _sampling(api_request, model),
            api_request.stream,
            _grammar(api_request.output_config),
            _tools(api_request),
            session_id=session_id,
            deadline=api_request.deadline,
            cache_salt=api_request.cache_salt,
            learn_prompt=api_request.learn_prompt,
        )

    def writer(self, api_request: MessagesRequest, context: AnswerContext) -> AnswerWriter:
        return MessagesWriter(context, api_request.max_tokens)

    def field_names(self, api_request: MessagesRequest) -> Mapping[str, str]:
        return {"stop": "stop_sequences", "prompt": "messages", "grammar": "output_config"}

    def error(self, error: ApiError) -> tuple[int, Any]:
        return error.status, error_body(error)


def _sampling(api_request: MessagesRequest, model: ServedModel) -> SamplingParams:
    names = ("max_tokens", "temperature", "top_p", "top_k", "seed")
    given = {name: value for name in names if (value := getattr(api_request, name)) is not None}
    stop = tuple(api_request.stop_sequences or ())
    return SamplingParams(**{"max_tokens": None, **model.generation_defaults, **given, "stop": stop})


def _effort(api_request: MessagesRequest) -> str:
    """How much the model should think."""
    kind = None if api_request.thinking is None else api_request.thinking.get("type")
    if api_request.thinking is not None and not isinstance(kind, str):
        raise refusal(f"thinking.type is {quoted(kind)}; allowed: enabled, adaptive, disabled", "thinking")
    effort = (api_request.output_config or {}).get("effort")
    if effort is not None and (not isinstance(effort, str) or effort not in EFFORTS):
        raise refusal(
            f"output_config.effort is {quoted(effort)}; allowed: {', '.join(EFFORTS)}", "output_config"
        )
    if kind == "disabled":
        return "none"
    return effort or ("none" if kind is None else _DEFAULT_EFFORT)


def _grammar(output_config: Mapping[str, Any] | None) -> Grammar | None:
    form = (output_config or {}).get("format")
    if form is None:
        return None
    if not isinstance(form, Mapping) or form.get("type") != "json_schema":
        raise refusal(
            "output_config.format has another type than json_schema; send that one", "output_config"
        )
    return structured.grammar_of_schema(form.get("schema"), "output_config.format.schema")


# ---------------------------------------------------------------------- tools


def _is_own(tool: Mapping[str, Any]) -> bool:
    """Whether the client runs the tool and describes it by a schema. Anthropic runs or describes all others."""
    return tool.get("type") in (None, "custom")


def _tools(api_request: MessagesRequest) -> ToolUse:
    """The tools that the model may call."""
    given = api_request.tools or []
    own = [
        FunctionTool(
            tool.get("name"),
            tool.get("description"),
            tool.get("input_schema"),
            tool.get("strict"),
            f"tools[{index}]",
            "input_schema",
        )
        for index, tool in enumerate(given)
        if _is_own(tool)
    ]
    choice, is_single = _tool_choice(api_request.tool_choice)
    ignored = [tool.get("name") for tool in given if not _is_own(tool)]
    # If tool_choice demands a call of an ignored tool, or of any tool while all are ignored, no call is possible.
    if ignored and (choice.name in ignored if choice.name is not None else not own):
        choice = ToolChoice()
    return chosen_tools(own, choice, not is_single)


def _tool_choice(given: Mapping[str, Any] | None) -> tuple[ToolChoice, bool]:
    """The choice, and whether an answer may have only one call."""
    if given is None:
        return ToolChoice(), False
    kind, name, is_single = given.get("type"), given.get("name"), given.get("disable_parallel_tool_use")
    if not isinstance(kind, str) or kind not in _CHOICES:
        raise refusal(f"tool_choice.type is {quoted(kind)}; allowed: {', '.join(_CHOICES)}", "tool_choice")
    if kind == "tool" and not isinstance(name, str):
        raise refusal("tool_choice has no name; send the name of a tool", "tool_choice")
    if is_single is not None and not isinstance(is_single, bool):
        raise refusal("tool_choice.disable_parallel_tool_use is not a boolean; send one", "tool_choice")
    mode: Any = _CHOICES[kind]
    return ToolChoice(mode, name if kind == "tool" else None), bool(is_single)


# ---------------------------------------------------------------------- the session


def _has_mark(api_request: MessagesRequest) -> bool:
    """Whether a `cache_control` marks a prefix."""
    if api_request.cache_control is not None:
        return True
    return any(
        isinstance(block, Mapping) and block.get("cache_control") is not None
        for block in _marked_places(api_request)
    )


def _marked_places(api_request: MessagesRequest) -> Iterator[Any]:
    """The parts of a body that may have a `cache_control`."""
    yield from api_request.tools or ()
    contents = [api_request.system, *(message.get("content") for message in api_request.messages)]
    for content in contents:
        if isinstance(content, list):
            yield from content


def _session_id(items: Sequence[Item], metadata: Mapping[str, Any] | None) -> str:
    """Identifies the conversation by what all its requests have in common: the user, the system prompt and the first
    message. Requests of one user with another system prompt, such as for a title, are another session."""
    user = (metadata or {}).get("user_id")
    digest = hashlib.sha256(user.encode("utf-8", "replace") if isinstance(user, str) else b"")
    for item in items:
        if isinstance(item, Message):
            digest.update(f"\0{item.role}\0{item.content}".encode("utf-8", "replace"))
        if not isinstance(item, Message) or item.role != "system":
            break
    return f"messages-{digest.hexdigest()[:32]}"
