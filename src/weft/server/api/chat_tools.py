"""Reads `tools` and `tool_choice` of chat completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from weft.server.api.custom_tools import custom_tool, listed_tools
from weft.server.api.file_search import is_file_search
from weft.server.api.schema import check_entries
from weft.server.api.tool_use import FunctionTool, ToolChoice, ToolUse, chosen_tools
from weft.server.errors import refusal

_TYPES = ("function", "custom")
"""The types of tools. A tool has its fields in an object with the name of its type."""
_CHOICES = (
    'auto, none, required, {"type": "function", "function": {"name": ...}}, {"type": "custom", "custom": {"name": ...}}, '
    '{"type": "allowed_tools", "allowed_tools": {"mode": "auto" or "required", "tools": [...]}}'
)


def chat_tools(
    tools: Sequence[Mapping[str, Any]], choice: str | Mapping[str, Any] | None, may_be_parallel: bool | None
) -> ToolUse:
    """The tools of a request and how the model may use them. Raises ApiError if tools or tool_choice are invalid."""
    given = listed_tools(
        _function_tool(tool, f"tools[{index}]")
        for index, tool in enumerate(tools)
        if not is_file_search(tool)
    )
    if (choice == "required" and not given and tools) or is_file_search(choice):
        # The server makes the required call: its own file search. The model then needs to call nothing.
        choice = "auto"
    allowed = None
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        choice, allowed = _allowed_tools(choice, given)
    name = _named(choice) if isinstance(choice, Mapping) else None
    if name is None and choice not in (None, "auto", "none", "required"):
        shown = str(choice) if isinstance(choice, str) else "an object without the name of a tool"
        raise refusal(f"tool_choice is {shown!r:.80}; allowed: {_CHOICES}", "tool_choice")
    mode: Any = "required" if name is not None else choice or "auto"
    return chosen_tools(given, ToolChoice(mode, name, allowed), may_be_parallel)


def custom_names(tools: Sequence[Mapping[str, Any]]) -> frozenset[str]:
    """The names of the custom tools. The tools must be valid."""
    return frozenset(tool["custom"]["name"] for tool in tools if tool["type"] == "custom")


def is_named(choice: str | Mapping[str, Any] | None) -> bool:
    """Whether tool_choice names one tool."""
    return isinstance(choice, Mapping) and choice.get("type") in _TYPES


def _allowed_tools(
    choice: Mapping[str, Any], given: Sequence[FunctionTool]
) -> tuple[str | None, frozenset[str]]:
    """The mode and the names of `{"type": "allowed_tools", ...}`. The prompt still has all tools, so that its cached
    prefix stays valid."""
    allowed = choice.get("allowed_tools")
    mode, tools = (
        (allowed.get("mode"), allowed.get("tools")) if isinstance(allowed, Mapping) else (None, None)
    )
    listed = tools if isinstance(tools, list) and tools else [None]
    check_entries("tool_choice.allowed_tools.tools", listed, "allowed_tools", "tool_choice")
    names = [_named(tool) if isinstance(tool, Mapping) else None for tool in listed]
    if mode not in ("auto", "required") or None in names:
        raise refusal(
            f"tool_choice.allowed_tools does not have the right form; allowed: {_CHOICES}", "tool_choice"
        )
    found = frozenset(name for name in names if name is not None)
    if unknown := found - {one.name for one in given if isinstance(one.name, str)}:
        raise refusal(
            f"tool_choice allows {min(unknown)!r:.80}, which is not in tools; send names of tools",
            "tool_choice",
        )
    return mode, found


def _fields(tool: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The inner object of a tool or of a choice."""
    kind = tool.get("type")
    fields = tool.get(kind) if isinstance(kind, str) and kind in _TYPES else None
    return fields if isinstance(fields, Mapping) else None


def _named(choice: Mapping[str, Any]) -> str | None:
    name = (_fields(choice) or {}).get("name")
    return name if isinstance(name, str) else None


def _function_tool(tool: Mapping[str, Any], where: str) -> FunctionTool:
    kind, fields = tool.get("type"), _fields(tool)
    if kind not in _TYPES:
        raise refusal(f"{where}.type is {str(kind)!r:.80}; allowed: {', '.join(_TYPES)}", f"{where}.type")
    if fields is None:
        raise refusal(f"{where} has no {kind}; send one with a name", f"{where}.{kind}")
    where, name, description = f"{where}.{kind}", fields.get("name"), fields.get("description")
    if kind == "custom":
        return custom_tool(name, description, fields.get("format"), where)
    return FunctionTool(
        name, description, fields.get("parameters"), fields.get("strict"), where, given=dict(tool)
    )
