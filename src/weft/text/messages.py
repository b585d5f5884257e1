"""Checks the messages and tools of a chat. Converts them to items of a conversation, and to the form that chat templates
expect."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from weft.errors import InvalidRequestError
from weft.text import conversation
from weft.text.conversation import Item
from weft.text.custom_calls import custom_arguments

Message = Mapping[str, Any]

ContentForm = Literal["text", "parts", "either"]
"""The content of a message that a template supports: a string, a list of parts, or both."""

# The keys under which clients send reasoning. Templates read the first or the second.
_REASONING = ("reasoning_content", "thinking", "reasoning")


def normalised_messages(
    messages: Sequence[Message], *, content_form: ContentForm, parse_arguments: bool
) -> list[dict[str, Any]]:
    """Copies of the messages in the form that the template expects.

    Content becomes a string or a list of parts, by `content_form`. With `parse_arguments`, the arguments of tool calls
    become objects; clients send them as strings of JSON.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise InvalidRequestError(f"messages is {_kind(messages)}; send a list of messages", field="messages")
    if not messages:
        raise InvalidRequestError("messages is empty; send at least one message", field="messages")
    return [
        _message(message, f"messages[{index}]", content_form, parse_arguments)
        for index, message in enumerate(messages)
    ]


def items_of(messages: Sequence[Message]) -> list[Item]:
    """The items of messages in the form of the OpenAI API. Raises InvalidRequestError if one is invalid."""
    checked = normalised_messages(messages, content_form="either", parse_arguments=False)
    return [item for index, one in enumerate(checked) for item in _items(one, f"messages[{index}]")]


def _items(message: dict[str, Any], where: str) -> Iterator[Item]:
    """The items of one message that `normalised_messages` has checked."""
    role, content = message.pop("role"), _texts(message.pop("content", None))
    if role == "tool":
        yield conversation.ToolResult(message.pop("tool_call_id", None), content or "", message)
        return
    reasoning = [message.pop(name, None) for name in _REASONING]
    if (
        role == "assistant"
        and (thought := next((one for one in reasoning if one is not None), None)) is not None
    ):
        yield conversation.Thought(str(thought))
    calls = message.pop("tool_calls", None) or ()
    yield conversation.Message(role, content, message)
    for index, call in enumerate(calls):
        yield _call(call, f"{where}.tool_calls[{index}]")


def _call(call: Mapping[str, Any], where: str) -> conversation.ToolCall:
    is_custom = call.get("type") == "custom"
    fields = call.get("custom" if is_custom else "function")
    fields = fields if isinstance(fields, Mapping) else {}
    if not isinstance(name := fields.get("name"), str):
        kind = "custom tool" if is_custom else "function"
        raise InvalidRequestError(f"{where} has no {kind} with a name; send one", field="messages")
    call_id, arguments = call.get("id"), fields.get("arguments")
    if is_custom:
        if not isinstance(given := fields.get("input"), str):
            raise InvalidRequestError(f"{where}.custom has no input; send a string", field="messages")
        arguments = custom_arguments(given)
    call_id = call_id if isinstance(call_id, str) else None
    return conversation.ToolCall(call_id, name, "{}" if arguments is None else arguments)


def _texts(content: Any) -> str | list[str] | None:
    return [part["text"] for part in content] if isinstance(content, list) else content


def checked_objects(values: Any, field: str) -> list[Any] | None:
    """Checks a list of objects, such as tools. Returns None for None and for an empty list."""
    if values is None:
        return None
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        raise InvalidRequestError(f"{field} is {_kind(values)}; send a list of objects", field=field)
    for index, value in enumerate(values):
        if not isinstance(value, Mapping):
            raise InvalidRequestError(f"{field}[{index}] is {_kind(value)}; send an object", field=field)
    return list(values) or None


def has_tool_calls(messages: Sequence[Message]) -> bool:
    return any(message.get("tool_calls") for message in messages)


def mentions_tools(messages: Any) -> bool:
    """Whether the messages contain tool calls or results. The messages need not be valid."""
    return isinstance(messages, Sequence) and any(
        isinstance(message, Mapping) and (message.get("tool_calls") or message.get("role") == "tool")
        for message in messages
    )


def with_known_forms(messages: Any, *, keeps_developer: bool) -> Any:
    """The same messages in forms that all templates know. They need not be valid.

    An assistant message with calls or thoughts alone gets "" as its content: for null, some templates write "None", and
    the template of Qwen 3 fails. The role developer becomes system unless `keeps_developer`.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        return messages
    return [_with_known_form(one, keeps_developer) if isinstance(one, Mapping) else one for one in messages]


def _with_known_form(message: Message, keeps_developer: bool) -> Message:
    role = message.get("role")
    if role == "developer" and not keeps_developer:
        return {**message, "role": "system"}
    if role == "assistant" and message.get("content") is None:
        reasoning = next((message[name] for name in _REASONING if message.get(name) is not None), None)
        return message if _needs_content(message, reasoning) else {**message, "content": ""}
    return message


def _message(message: Any, where: str, content_form: ContentForm, parse_arguments: bool) -> dict[str, Any]:
    """Checks one message, and converts it to the form that the template expects."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidRequestError(
            f"{where} is {_kind(message)} without a role; send {{'role': 'user', 'content': '...'}}"
            if isinstance(message, Mapping)
            else f"{where} is {_kind(message)}; send {{'role': 'user', 'content': '...'}}",
            field="messages",
        )
    result = dict(message)
    if result["role"] == "function" or result.get("function_call") is not None:
        raise InvalidRequestError(
            f"{where} has the form of the old function calls; send tool_calls, and results with the role tool",
            field="messages",
        )
    if result.get("content") is None and isinstance(result.get("refusal"), str):
        result["content"] = result["refusal"]
    reasoning = next((result[name] for name in _REASONING if result.get(name) is not None), None)
    if result.get("content") is None and _needs_content(result, reasoning):
        raise InvalidRequestError(
            f"{where} has no content; send a string, or a list of text parts", field="messages"
        )
    if "content" in result:
        result["content"] = _content(result["content"], f"{where}.content", content_form)
    if result.get("tool_calls") is not None:
        calls = checked_objects(result["tool_calls"], f"{where}.tool_calls") or []
        result["tool_calls"] = [_tool_call(call, parse_arguments) for call in calls]
    if reasoning is not None:
        result = {"thinking": reasoning, **result, "reasoning_content": reasoning}
    return result


def _needs_content(message: Message, reasoning: Any) -> bool:
    """Whether a message must have content. An assistant message may have only tool calls or reasoning. Unknown roles are
    left to the template."""
    if message["role"] == "assistant":
        return not message.get("tool_calls") and reasoning is None
    return message["role"] in ("system", "developer", "user", "tool")


def _content(content: Any, where: str, form: ContentForm) -> Any:
    if content is None:
        return None
    if isinstance(content, str):
        return _parts([content]) if form == "parts" else content
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise InvalidRequestError(
            f"{where} is {_kind(content)}; send a string, or a list of text parts", field="messages"
        )
    texts = [_text_of_part(part, f"{where}[{index}]") for index, part in enumerate(content)]
    if form == "either" and len(texts) == 1:
        return texts[0]  # a string and a list with one part must give the same prompt
    return "\n".join(texts) if form == "text" else _parts(texts)


def _parts(texts: list[str]) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def _text_of_part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind not in ("text", "refusal"):
        found = f"has the type {kind!r:.80}" if isinstance(part, Mapping) else f"is {_kind(part)}"
        raise InvalidRequestError(
            f"{where} {found}; weft accepts only text: {{'type': 'text', 'text': '...'}}", field="messages"
        )
    text = part.get(kind)
    if not isinstance(text, str):
        raise InvalidRequestError(f"{where}.{kind} is {_kind(text)}; send a string", field="messages")
    return text


def _tool_call(call: Mapping[str, Any], parse_arguments: bool) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, Mapping) or "arguments" not in function:
        return dict(call)
    arguments = function["arguments"]
    if parse_arguments and isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            pass  # a model may have written invalid JSON; some templates accept the string
    elif not parse_arguments and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


def _kind(value: Any) -> str:
    kinds = {dict: "an object", list: "a list", str: "a string", type(None): "null", bool: "a boolean"}
    return kinds.get(type(value), "a number" if isinstance(value, int | float) else type(value).__name__)
