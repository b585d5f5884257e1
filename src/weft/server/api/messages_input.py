"""Reads the messages of the Anthropic API: content blocks become items of a conversation."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from weft.server.api.schema import check_entries
from weft.server.errors import refusal
from weft.text.conversation import Item, Message, Thought, ToolCall, ToolResult

BILLING_HEADER = "x-anthropic-billing-header:"
"""The first system block of Claude Code begins with this header, for Anthropic's own bills. weft removes its line. The line
changes with the conversation, so that no two prompts would begin with the same tokens."""
_REFUSED_BLOCKS = {
    "image": "this model reads text only; leave images out",
    "document": "this model reads text only; send a source of the type text or content",
}
_HOSTED = frozenset(
    (
        *("server_tool_use", "web_search_tool_result", "web_fetch_tool_result", "tool_search_tool_result"),
        *("code_execution_tool_result", "bash_code_execution_tool_result", "advisor_tool_result"),
        *("text_editor_code_execution_tool_result", "mcp_tool_use", "mcp_tool_result", "container_upload"),
    )
)
"""Blocks of tools that the Anthropic API runs itself. weft has none of these tools, and leaves the blocks out."""
_ROLES = ("user", "assistant", "system")


def items_of_messages(
    system: str | Sequence[Any] | None, messages: Sequence[Mapping[str, Any]]
) -> tuple[list[Item], bool]:
    """The items of a request, and whether the answer continues the last one. Raises ApiError if a message is invalid."""
    if not messages:
        raise refusal("messages is empty; send at least one message", "messages")
    reader = _Reader()
    reader.system(_system_text(system))
    for index, message in enumerate(messages):
        role, content, where = message.get("role"), message.get("content"), f"messages[{index}]"
        if role not in _ROLES:
            raise refusal(f"{where}.role is {quoted(role)}; allowed: {', '.join(_ROLES)}", "messages")
        if role == "system":
            reader.system(_joined(_texts(content, f"{where}.content")))
        elif role == "assistant":
            reader.assistant(content, f"{where}.content")
        else:
            reader.user(content, f"{where}.content")
    return reader.finish()


def ignored_blocks(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """The types of the blocks that are left out. The messages need not be valid."""
    contents = [one for message in messages if isinstance(one := message.get("content"), list)]
    return sorted({block["type"] for content in contents for block in content if _is_hosted(block)})


def _is_hosted(block: Any) -> bool:
    kind = block.get("type") if isinstance(block, Mapping) else None
    return isinstance(kind, str) and kind in _HOSTED


class _Reader:
    """Owns the items read so far. Adjacent messages of one role become one message: some templates refuse two in a row."""

    def __init__(self) -> None:
        self._items: list[Item] = []
        self._role = ""
        self._texts: list[str] = []
        """The texts of the open message, which has `_role`. It is not in the items yet. Empty: no message is open."""
        self._open_calls: dict[str, None] = {}
        """The ids of the calls whose result has not been read, in order."""
        self._held: list[str] = []
        """Texts of the user, and reminders, between a call and its result. They follow the last result: many templates
        refuse a message between both."""

    def system(self, text: str) -> None:
        if not text:
            return
        if not self._items and self._role in ("", "system"):
            self._say("system", text)
        else:
            # Many templates refuse a system message after the first message.
            self._say("user", f"<system-reminder>\n{text}\n</system-reminder>")

    def user(self, content: Any, where: str) -> None:
        texts: list[str] = []
        has_results = False
        for block, place in _blocks(content, where):
            if isinstance(block, Mapping) and block.get("type") == "tool_result":
                self._result(block, place)
                has_results = True
            elif not _is_hosted(block):
                texts += _texts_of(block, place)
        if texts or not has_results:
            self._say("user", _joined(texts))

    def assistant(self, content: Any, where: str) -> None:
        self._refuse_open_calls(where)
        for block, place in _blocks(content, where):
            kind = block.get("type") if isinstance(block, Mapping) else None
            if kind == "thinking":
                if text := _string(block, "thinking", place):
                    self._add(Thought(text))
            elif kind == "tool_use":
                self._call(block, place)
            elif kind != "redacted_thinking" and not _is_hosted(block):  # redacted_thinking is encrypted
                for text in _texts_of(block, place):
                    self._say("assistant", text)

    def finish(self) -> tuple[list[Item], bool]:
        self._refuse_open_calls("messages")
        self._close_message()
        if not self._items:
            raise refusal("the messages have no text; send some", "messages")
        last = self._items[-1]
        is_continued = isinstance(last, Message) and last.role == "assistant" and bool(last.content)
        return self._items, is_continued

    def _say(self, role: str, text: str) -> None:
        """Adds a text to the open message, or opens another one."""
        if role == "user" and self._open_calls:
            self._held.append(text)
            return
        if self._role != role:
            self._close_message()
            self._role = role
        self._texts.append(text)

    def _add(self, item: Item) -> None:
        self._close_message()
        self._items.append(item)

    def _close_message(self) -> None:
        if self._texts:
            self._items.append(Message(self._role, _joined(self._texts)))
        self._role, self._texts = "", []

    def _call(self, block: Mapping[str, Any], where: str) -> None:
        call_id, name = _string(block, "id", where), _string(block, "name", where)
        if call_id in self._open_calls:
            raise refusal(
                f"{where}.id is {call_id!r:.80}, as in an earlier call; ids must be unique", "messages"
            )
        arguments = block.get("input", {})
        if not isinstance(arguments, Mapping):
            raise refusal(f"{where}.input is not an object; send one", "messages")
        self._add(ToolCall(call_id, name, _json(arguments, where)))
        self._open_calls[call_id] = None

    def _result(self, block: Mapping[str, Any], where: str) -> None:
        """Adds the result of a tool. After the last open call, also adds the texts that were held back."""
        call_id = _string(block, "tool_use_id", where)
        if call_id not in self._open_calls:
            raise refusal(
                f"{where}.tool_use_id is {call_id!r:.80}, but no tool_use block before it has this id and no result; "
                "send the call with its result",
                "messages",
            )
        del self._open_calls[call_id]
        content = block.get("content")
        text = "" if content is None else _joined(_texts(content, f"{where}.content"))
        if block.get("is_error") is True:
            text = f"Error: {text}" if text else "Error"
        self._add(ToolResult(call_id, text))
        if not self._open_calls:
            for held in self._held:
                self._say("user", held)
            self._held.clear()

    def _refuse_open_calls(self, where: str) -> None:
        if self._open_calls:
            named = ", ".join(f"{one!r:.80}" for one in list(self._open_calls)[:4])
            raise refusal(
                f"{where}: the calls {named} have no result; send a tool_result block for each tool_use block",
                "messages",
            )


def _system_text(system: str | Sequence[Any] | None) -> str:
    if system is None:
        return ""
    return _joined([text for one in _texts(system, "system") if (text := _without_billing_header(one))])


def _without_billing_header(text: str) -> str:
    return text.partition("\n")[2].lstrip("\n") if text.startswith(BILLING_HEADER) else text


def _blocks(content: Any, where: str) -> Iterator[tuple[Any, str]]:
    """The blocks of a message's content, with their paths in the body. A string is one block."""
    if isinstance(content, str):
        yield content, where
        return
    if not isinstance(content, list):
        raise refusal(f"{where} is not a string or a list of blocks; send one of them", "messages")
    check_entries(where, content, "content", "messages")
    yield from ((block, f"{where}[{index}]") for index, block in enumerate(content))


def _texts(content: Any, where: str) -> list[str]:
    return [text for block, place in _blocks(content, where) for text in _texts_of(block, place)]


def _texts_of(block: Any, where: str) -> list[str]:
    """The texts of one block."""
    if isinstance(block, str):
        return [block]
    if not isinstance(block, Mapping):
        raise refusal(f"{where} is not a block; send an object with a type", "messages")
    kind = block.get("type")
    if kind == "text":
        return [_string(block, "text", where)]
    if kind == "document":
        return _document(block, where)
    if kind == "search_result":
        titles = [one for name in ("title", "source") if isinstance(one := block.get(name), str)]
        return [*titles, *_inner_texts(block.get("content"), f"{where}.content")]
    if kind == "tool_reference":
        return [_string(block, "tool_name", where)]
    known = _REFUSED_BLOCKS.get(kind) if isinstance(kind, str) else None
    reason = known or "allowed here: text, document, search_result"
    raise refusal(f"{where} has the type {quoted(kind)}: {reason}", "messages")


def _inner_texts(content: Any, where: str) -> list[str]:
    """The texts of a document or a search result. Neither may contain documents or search results, which limits the
    nesting."""
    for block, place in _blocks(content, where):
        if isinstance(block, Mapping) and block.get("type") in ("document", "search_result"):
            raise refusal(f"{place} has the type {quoted(block['type'])}: allowed here: text", "messages")
    return _texts(content, where)


def _document(block: Mapping[str, Any], where: str) -> list[str]:
    source = block.get("source")
    kind = source.get("type") if isinstance(source, Mapping) else None
    titles = [one for name in ("title", "context") if isinstance(one := block.get(name), str)]
    if isinstance(source, Mapping) and kind == "text":
        return [*titles, _string(source, "data", f"{where}.source")]
    if isinstance(source, Mapping) and kind == "content":
        return [*titles, *_inner_texts(source.get("content"), f"{where}.source.content")]
    raise refusal(f"{where}.source has the type {quoted(kind)}: {_REFUSED_BLOCKS['document']}", "messages")


def _string(block: Mapping[str, Any], name: str, where: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise refusal(f"{where}.{name} is missing or not a string; send a string", "messages")
    return value


def _joined(texts: Sequence[str]) -> str:
    return texts[0] if len(texts) == 1 else "\n".join(text for text in texts if text)


def _json(value: Any, where: str) -> str:
    try:
        # With spaces, as most models write it. Then the next prompt has the same tokens as the answer: a prefix hit.
        return json.dumps(value, ensure_ascii=False)
    except RecursionError:
        raise refusal(f"{where}.input is nested too deeply; use fewer levels", "messages") from None


def quoted(value: Any) -> str:
    """Quotes a wrong value for an error. The field accepts only certain names."""
    return f"{value!r:.80}" if isinstance(value, str) else "missing" if value is None else "not a string"
