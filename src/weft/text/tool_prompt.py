"""Tools for models whose template does not support them.

weft describes the tools in a system message, and renders earlier calls and results as text. It uses the Hermes format,
which most models have seen in training.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from weft.errors import InvalidRequestError
from weft.text.messages import Message, checked_objects, normalised_messages
from weft.text.tool_formats import HERMES

_PROMPT = """\
You can call these functions. Each line is one of them, with its parameters as a JSON schema:
<tools>
{tools}
</tools>
To call a function, answer with nothing but its name and arguments as JSON between these tags:
{example}
To call several, write one after the other. You are then given the results between <tool_response></tool_response>.
If no function helps, answer in your own words, without these tags."""
_EXAMPLE = HERMES.render_calls([("<function-name>", "<arguments as a JSON object>")])


def with_tools_as_text(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None, *, supports_system_messages: bool
) -> list[dict[str, Any]]:
    """Converts messages and tools for a template that supports only roles and content."""
    checked = normalised_messages(messages, content_form="text", parse_arguments=False)
    rewritten: list[dict[str, Any]] = []
    is_after_result = False
    for index, message in enumerate(checked):
        is_result = message["role"] == "tool"
        if is_result:
            message = {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
        elif message.get("tool_calls"):
            message = _with_calls(message, f"messages[{index}].tool_calls")
        if is_result and is_after_result:
            # All results go into one message: some templates require alternating roles.
            rewritten[-1]["content"] += "\n" + message["content"]
        else:
            rewritten.append(message)
        is_after_result = is_result
    definitions = checked_objects(tools, "tools")
    return (
        _with_prompt(rewritten, _prompt(definitions), supports_system_messages) if definitions else rewritten
    )


def _prompt(tools: Sequence[Mapping[str, Any]]) -> str:
    lines = []
    for index, tool in enumerate(tools):
        function = tool.get("function", tool)
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise InvalidRequestError(f"tools[{index}] has no function with a name", field="tools")
        known = {
            key: function[key]
            for key in ("name", "description", "parameters")
            if function.get(key) is not None
        }
        lines.append(json.dumps(known, ensure_ascii=False))
    return _PROMPT.format(tools="\n".join(lines), example=_EXAMPLE)


def _with_calls(message: dict[str, Any], where: str) -> dict[str, Any]:
    calls = []
    for index, call in enumerate(message["tool_calls"]):
        function = call.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str):
            raise InvalidRequestError(f"{where}[{index}] has no function with a name", field="messages")
        calls.append((name, str(function.get("arguments") or "{}")))
    content = message.get("content")
    rendered = HERMES.render_calls(calls)
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "content": f"{content}\n{rendered}" if content else rendered}


def _with_prompt(
    messages: list[dict[str, Any]], prompt: str, supports_system_messages: bool
) -> list[dict[str, Any]]:
    first, *others = messages
    if not supports_system_messages:
        # Without a system message, the prompt goes into the first message.
        return [{**first, "content": f"{prompt}\n\n{first.get('content') or ''}"}, *others]
    if first["role"] in ("system", "developer"):
        return [{**first, "content": f"{first['content']}\n\n{prompt}"}, *others]
    return [{"role": "system", "content": prompt}, *messages]
