"""A conversation, independent of the API format: every format is parsed into these items. `template_messages` converts
them into the messages that chat templates read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

_MAX_OF_KIND = 4096
_MAX_WITHOUT_INSTRUCTIONS = 32
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


class Message(msgspec.Struct, frozen=True, tag=True):
    role: str
    content: str | list[str] | None
    """One text, or several parts. None: an assistant message with only tool calls or thoughts."""
    more: dict[str, Any] = {}
    """Other fields that the client sent, such as `name`. Templates may read them."""


class Thought(msgspec.Struct, frozen=True, tag=True):
    """Reasoning of the model before its message or its tool calls."""

    text: str


class ToolCall(msgspec.Struct, frozen=True, tag=True):
    id: str | None
    name: str
    arguments: str
    """JSON, as the model wrote it."""


class ToolResult(msgspec.Struct, frozen=True, tag=True):
    call_id: str | None
    content: str | list[str]
    more: dict[str, Any] = {}


Item = Message | Thought | ToolCall | ToolResult


class Conversation(msgspec.Struct, frozen=True):
    """The items of one prompt, with the options of the chat template."""

    items: list[Item]
    documents: list[dict[str, Any]] | None = None
    """Documents for chat templates that read them, as the client sent them."""
    template_options: dict[str, Any] = {}
    continues_last: bool = False
    """Whether the answer continues the last message."""
    opens_answer: bool = True
    """Whether the prompt ends with the beginning of an answer. Without effect if `continues_last`."""
    reasoning_effort: str | None = None
    """How much the model should think: one of `EFFORTS`, from none to much. None: the default of its template."""


def starts_of_rest(items: Sequence[Item]) -> list[int]:
    """The items at which a conversation may begin after its oldest items were left out, oldest first. A thought, the
    calls after it and their results stay together."""
    first = _num_leading_instructions(items)
    found = [first]
    open_calls: set[str | None] = set()
    for index in range(first, len(items)):
        item = items[index]
        may_begin = isinstance(item, Message | Thought) and not isinstance(items[index - 1], Thought)
        if index > first and may_begin and not open_calls:
            found.append(index)
        if isinstance(item, ToolCall):
            open_calls.add(item.id)
        elif isinstance(item, ToolResult):
            open_calls.discard(item.call_id)
    return found


def from_start(conversation: Conversation, start: int) -> Conversation:
    """The conversation without the items before `start`. System messages at its beginning stay."""
    items = conversation.items
    first = _num_leading_instructions(items)
    return msgspec.structs.replace(conversation, items=[*items[:first], *items[start:]])


def text_of_kind(items: Sequence[Item]) -> str:
    """The beginning of the text that conversations of the same kind share: their instructions. Without instructions, the
    first words."""
    count = _num_leading_instructions(items)
    shared = items[:count] or items[:1]
    texts = "".join(str(item.content) for item in shared if isinstance(item, Message))
    return texts[:_MAX_OF_KIND] if count else texts[:_MAX_WITHOUT_INSTRUCTIONS]


def _num_leading_instructions(items: Sequence[Item]) -> int:
    for index, item in enumerate(items):
        if not isinstance(item, Message) or item.role not in ("system", "developer"):
            return index
    return len(items)


def template_messages(items: Sequence[Item]) -> list[dict[str, Any]]:
    """The messages of the items, with the field names that chat templates read.

    Successive thoughts, one assistant message and its tool calls become one message. A second assistant message begins
    a new one, and so does a thought after a message or a call.
    """
    messages: list[dict[str, Any]] = []
    open_message: dict[str, Any] | None = None
    """The assistant message that the next item may join."""
    for item in items:
        if isinstance(item, ToolResult):
            messages.append(
                {"role": "tool", "content": _content(item.content), **item.more, **_id(item.call_id)}
            )
            open_message = None
        elif isinstance(item, Message) and item.role != "assistant":
            messages.append({"role": item.role, "content": _content(item.content), **item.more})
            open_message = None
        else:
            if open_message is None or not _may_join(item, open_message):
                open_message = {"role": "assistant", "content": None}
                messages.append(open_message)
            _join(item, open_message)
    return messages


def _may_join(item: Message | Thought | ToolCall, message: dict[str, Any]) -> bool:
    """Whether the item belongs to this message. A call does; a thought or a text does only before content and calls."""
    return isinstance(item, ToolCall) or (
        message.keys() <= {"role", "content", "reasoning_content"} and (message["content"] is None)
    )


def _join(item: Message | Thought | ToolCall, message: dict[str, Any]) -> None:
    """Adds the item to the message."""
    if isinstance(item, Thought):
        earlier = message.get("reasoning_content")
        message["reasoning_content"] = item.text if earlier is None else f"{earlier}\n{item.text}"
    elif isinstance(item, Message):
        message["content"] = _content(item.content)
        message.update(item.more)
    else:
        function = {"name": item.name, "arguments": item.arguments}
        call = {"type": "function", "function": function}
        message.setdefault("tool_calls", []).append(call if item.id is None else {"id": item.id, **call})


def _content(content: str | list[str] | None) -> Any:
    """A text is a string and never a list with one part, so that both forms of a message give the same prompt."""
    if isinstance(content, list):
        return content[0] if len(content) == 1 else [{"type": "text", "text": text} for text in content]
    return content


def _id(call_id: str | None) -> dict[str, str]:
    return {} if call_id is None else {"tool_call_id": call_id}
