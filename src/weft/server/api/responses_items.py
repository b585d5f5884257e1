"""The input items of the Responses API: checks them, converts them to items of a conversation, and lists them.

An item exists in three forms. The client sends the first one, with many variants. `listed_items` makes the second one,
which is listed and stored: one form for each type, with an id. `conversation_items` makes items of a conversation. Both
functions accept the first two forms. The third form is never converted back.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from weft.server.api.responses_tools import shown_name
from weft.server.errors import refusal
from weft.text.conversation import Item, Message, Thought, ToolCall, ToolResult
from weft.text.custom_calls import custom_arguments

_ROLES = ("user", "assistant", "system", "developer")
_TEXT_PARTS = {
    **dict.fromkeys(("input_text", "output_text", "text", "summary_text", "reasoning_text"), "text"),
    "refusal": "refusal",
}
"""The field with the text, by the type of a part."""
_HOSTED = frozenset(
    (
        *("web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call"),
        *("computer_call", "computer_call_output", "local_shell_call", "local_shell_call_output"),
        *("shell_call", "shell_call_output", "apply_patch_call", "apply_patch_call_output"),
        *("mcp_list_tools", "mcp_approval_request", "mcp_approval_response", "mcp_call"),
        *("tool_search_call", "tool_search_output", "compaction"),
    )
)
"""Items of tools that the OpenAI API runs itself. weft has none of these tools, and leaves the items out."""
_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
}
_TYPES = (*_PREFIXES, "item_reference")
_SEALED = "weft-1:"
"""The first characters of every `encrypted_content` that this server makes."""


def sealed(text: str) -> str:
    """Thoughts in a form that clients send back without reading it. It is encoded, not encrypted: the client has seen
    the text."""
    return _SEALED + base64.urlsafe_b64encode(text.encode()).decode()


def item_type(item: Mapping[str, Any]) -> str:
    """The type of an item. Some clients leave it out."""
    kind = item.get("type")
    if kind is None:
        return "message" if "role" in item else "item_reference"
    return kind if isinstance(kind, str) else ""


def check_items(items: Any) -> list[Mapping[str, Any]]:
    """The input of a request as a list of items. A text is the message of a user."""
    if isinstance(items, str):
        return [{"type": "message", "role": "user", "content": items}]
    if items is None:
        return []
    for index, item in enumerate(items):
        if not isinstance(item, Mapping):
            raise refusal(f"input[{index}] is not an object; send an item with a type", f"input[{index}]")
    return list(items)


def ignored_items(items: Any) -> list[str]:
    """The types of the items in a request that weft leaves out."""
    kinds = (
        (item.get("type") for item in items if isinstance(item, Mapping)) if isinstance(items, list) else ()
    )
    return sorted({kind for kind in kinds if isinstance(kind, str) and kind in _HOSTED})


def referenced_ids(items: Iterable[Mapping[str, Any]]) -> list[str]:
    """The ids of `item_reference` items. Raises ApiError if one has none."""
    found: dict[str, None] = {}
    for index, item in enumerate(items):
        if item_type(item) == "item_reference":
            found[_text(item, "id", f"input[{index}]")] = None
    return list(found)


def with_references(
    items: Iterable[Mapping[str, Any]], found: Mapping[str, Mapping[str, Any]], max_bytes: int
) -> tuple[list[Mapping[str, Any]], int]:
    """Replaces references by the items that they refer to, from `found`. Also returns the bytes of all inserted items.
    An item counts for each reference to it: a short body may refer to a long item thousands of times."""
    sizes: dict[str, int] = {}
    resolved = []
    num_bytes = 0
    for item in items:
        if item_type(item) == "item_reference":
            item = found[item_id := item["id"]]
            if item_id not in sizes:
                sizes[item_id] = len(msgspec.json.encode(item))
            num_bytes += sizes[item_id]
            if num_bytes > max_bytes:
                message = f"the items that input refers to have more than {max_bytes} bytes (max_body_bytes); send fewer"
                raise refusal(message, "input")
        resolved.append(item)
    return resolved, num_bytes


def conversation_items(items: Sequence[Mapping[str, Any]], where: str = "input") -> list[Item]:
    """The items of a conversation for items that the client sent, or that were stored. Raises ApiError if one is
    invalid."""
    found: list[Item] = []
    for index, item in enumerate(items):
        found += _converted(item, f"{where}[{index}]")
    return found


def without_lost_calls(items: Sequence[Item]) -> list[Item]:
    """The items without those tool results whose call is not among the items."""
    calls = {item.id for item in items if isinstance(item, ToolCall)}
    return [item for item in items if not isinstance(item, ToolResult) or item.call_id in calls]


def check_calls(items: Sequence[Item]) -> None:
    """Raises ApiError unless each call has one result, after it, and each result has a call."""
    open_calls: set[str | None] = set()
    for item in items:
        if isinstance(item, ToolCall):
            open_calls.add(item.id)
        elif isinstance(item, ToolResult):
            if item.call_id not in open_calls:
                raise refusal(
                    f"the output with the call_id {item.call_id!r:.80} has no call before it, or is a second one; "
                    "send each call with one output",
                    "input",
                )
            open_calls.discard(item.call_id)
    if open_calls:
        first = min(map(str, open_calls))
        raise refusal(
            f"the call {first!r:.80} has no output; send a function_call_output for each call", "input"
        )


def listed_items(items: Iterable[Mapping[str, Any]], request_id: str) -> list[dict[str, Any]]:
    """The items as they are listed and stored. Each has an id: the client's, or one made of `request_id`. `items` are
    valid, and have no references."""
    found = []
    for index, item in enumerate(items):
        kind = item_type(item)
        if kind in _PREFIXES:
            given = item.get("id")
            own = f"{_PREFIXES[kind]}_{request_id}_in{index}"
            found.append(_listed(item, kind, given if isinstance(given, str) and given else own))
    return found


def response_of_item(item_id: str) -> str | None:
    """The id of the response that an item belongs to. None if this server did not make the id of the item."""
    _, found, rest = item_id.partition("_")
    request_id, has_index, _ = rest.rpartition("_")
    return f"resp_{request_id}" if found and has_index else None


def _converted(item: Mapping[str, Any], where: str) -> list[Item]:
    kind = item_type(item)
    if kind == "message":
        return [_message(item, where)]
    if kind == "reasoning":
        text = _thought(item, where)
        return [Thought(text)] if text else []
    if kind in ("function_call", "custom_tool_call"):
        return [_call(item, kind == "custom_tool_call", where)]
    if kind in ("function_call_output", "custom_tool_call_output"):
        content = _texts(item.get("output"), f"{where}.output")
        return [ToolResult(_text(item, "call_id", where), content)]
    if kind in _HOSTED:
        return []
    raise refusal(
        f"{where}.type is {str(item.get('type'))!r:.80}; allowed: {', '.join(_TYPES)}", f"{where}.type"
    )


def _message(item: Mapping[str, Any], where: str) -> Message:
    role = item.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise refusal(f"{where}.role is {str(role)!r:.80}; allowed: {', '.join(_ROLES)}", f"{where}.role")
    return Message(role, _texts(item.get("content"), f"{where}.content"))


def _call(item: Mapping[str, Any], is_custom: bool, where: str) -> ToolCall:
    namespace = item.get("namespace")
    name = shown_name(_text(item, "name", where), namespace if isinstance(namespace, str) else None)
    arguments = (
        custom_arguments(_text(item, "input", where)) if is_custom else _text(item, "arguments", where)
    )
    return ToolCall(_text(item, "call_id", where), name, arguments or "{}")


def _thought(item: Mapping[str, Any], where: str) -> str:
    """The text of a reasoning item: its content, or its `encrypted_content` if this server made it, or else its
    summary."""
    content, summary = (
        "" if (value := item.get(name)) is None else _texts(value, f"{where}.{name}")
        for name in ("content", "summary")
    )
    given = item.get("encrypted_content")
    if not content and isinstance(given, str) and given.startswith(_SEALED):
        try:
            return base64.b64decode(given[len(_SEALED) :], b"-_", validate=True).decode()
        except ValueError:
            name = f"{where}.encrypted_content"
            raise refusal(f"{name} was changed; send it as it was received", name) from None
    texts = content or summary
    return texts if isinstance(texts, str) else "\n\n".join(texts)


def _texts(content: Any, where: str) -> str | list[str]:
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise refusal(f"{where} is neither a string nor a list of parts; send one of them", where)
    return [_part(part, f"{where}[{index}]") for index, part in enumerate(content)] or ""


def _part(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(kind, str) or kind not in _TEXT_PARTS:
        raise refusal(
            f"{where} has the type {str(kind)!r:.80}; weft reads only text: {{'type': 'input_text', 'text': '...'}}",
            where,
        )
    return _text(part, _TEXT_PARTS[kind], where)


def _text(item: Mapping[str, Any], name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise refusal(f"{where}.{name} is missing or not a string; send a string", f"{where}.{name}")
    return value


def _listed(item: Mapping[str, Any], kind: str, item_id: str) -> dict[str, Any]:
    head = {"id": item_id, "type": kind}
    if kind == "reasoning":
        content, summary = (_part_texts(item.get(name) or ()) for name in ("content", "summary"))
        return {
            **head,
            "summary": [{"type": "summary_text", "text": text} for text in summary],
            "content": [{"type": "reasoning_text", "text": text} for text in content] or None,
            "encrypted_content": item.get("encrypted_content"),
        }
    head["status"] = "completed"
    if kind == "message":
        return {**head, "role": item["role"], "content": _listed_content(item["content"], item["role"])}
    if kind.endswith("_output"):
        output = item["output"]
        if not isinstance(output, str):
            output = [{"type": "input_text", "text": text} for text in _part_texts(output)]
        return {**head, "call_id": item["call_id"], "output": output}
    text = "input" if kind == "custom_tool_call" else "arguments"
    namespace = {"namespace": item["namespace"]} if isinstance(item.get("namespace"), str) else {}
    return {**head, "call_id": item["call_id"], "name": item["name"], text: item[text], **namespace}


def _listed_content(content: Any, role: str) -> list[dict[str, Any]]:
    if role != "assistant":
        return [{"type": "input_text", "text": text} for text in _part_texts(content)]
    return [
        {"type": "refusal", "refusal": part["refusal"]}
        if isinstance(part, Mapping) and part["type"] == "refusal"
        else {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
        for part, text in zip(
            [content] if isinstance(content, str) else content, _part_texts(content), strict=True
        )
    ]


def _part_texts(content: Any) -> list[str]:
    if isinstance(content, str):
        return [content]
    return [part[_TEXT_PARTS[part["type"]]] for part in content]
