"""The tools of the Responses API: how they are shown to the model, and how its calls are written back.

| type | shown to the model as | a call is returned as |
|---|---|---|
| `function` | the function | `function_call` |
| `custom` | a function with one string, `input` | `custom_tool_call` with that string |
| `namespace` | its tools, each with the name `namespace__tool` | a call with the bare name and the `namespace` |
| `file_search` | not at all: the server searches before it generates (`file_search.py`) | `file_search_call` |
| any other | not at all | never |

Other types are run by the server in the OpenAI API (web search, code interpreter). weft has none of them, so they are
ignored: agents send them with every request, and a refusal would end them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weft.server.api import file_search
from weft.server.api.custom_tools import custom_tool, listed_tools
from weft.server.api.schema import check_entries
from weft.server.api.tool_use import FunctionTool, ToolChoice
from weft.server.errors import refusal

_LONGEST_NAME = 64
_CHOICES = (
    'auto, none, required, {"type": "function", "name": ...}, {"type": "custom", "name": ...}, '
    '{"type": "allowed_tools", "mode": ..., "tools": [...]}'
)


@dataclass(frozen=True)
class ShownTool:
    """One tool as the client named it."""

    name: str
    namespace: str | None = None
    is_custom: bool = False


def shown_name(name: str, namespace: str | None) -> str:
    """The name of a tool in the prompt. It depends on nothing but the name and the namespace, so that the tools of earlier
    calls keep their names."""
    if namespace is None:
        return name
    joined = f"{namespace.rstrip('_')}__{name}"
    return joined if len(joined) <= _LONGEST_NAME else name


def shown_tools(tools: Sequence[Any]) -> dict[str, ShownTool]:
    """The tools that the model sees, by the name that it sees. The tools need not be valid."""
    found: dict[str, ShownTool] = {}
    for tool, namespace, _ in _walk(tools):
        name = tool.get("name")
        if isinstance(name, str):
            one = ShownTool(name, namespace, tool.get("type") == "custom")
            found[shown_name(name, namespace)] = one
    return found


def function_tools(tools: Sequence[Any]) -> list[FunctionTool]:
    """The tools as functions, not checked."""
    return listed_tools(_as_function(tool, namespace, where) for tool, namespace, where in _walk(tools))


def known_tools(tools: Sequence[Any]) -> list[Mapping[str, Any]]:
    """The tools that are not ignored, as the client sent them."""
    return [tool for tool in tools if not _is_ignored(tool)]


def ignored_tools(tools: Sequence[Any]) -> list[str]:
    """The positions and types of the tools that are ignored, also of tools inside namespaces."""
    found: list[str] = []
    for index, tool in enumerate(tools):
        if _is_ignored(tool):
            found.append(f"tools.{index}.{_type(tool)}")
        elif isinstance(tool, Mapping) and isinstance(inner := tool.get("tools"), list):
            found += (f"tools.{index}.{_type(one)}" for one in inner if not _may_be_in_namespace(one))
    return found


def known_choice(choice: Any, tools: Sequence[Any]) -> Any:
    """The choice as the client sent it; auto if it names a tool that is ignored, or requires a call and all tools are
    ignored."""
    known = ("function", "custom", "allowed_tools", file_search.KIND)
    is_ignored = isinstance(choice, Mapping) and _type(choice) not in known
    needs_any = choice == "required" or _type(choice) == "allowed_tools"
    if needs_any and ignored_tools(tools) and not any(map(_may_be_called, tools)):
        is_ignored = True
    return "auto" if choice is None or is_ignored else choice


def tool_choice(choice: Any, tools: Sequence[Any]) -> ToolChoice:
    """Parses `tool_choice`. The choice of an ignored tool becomes auto. Raises ApiError if the choice is invalid."""
    choice = known_choice(choice, tools)
    if isinstance(choice, str):
        if choice in ("auto", "none", "required"):
            return ToolChoice(choice)  # type: ignore[arg-type]
        raise refusal(f"tool_choice is {choice!r:.80}; allowed: {_CHOICES}", "tool_choice")
    kind = _type(choice)
    if kind == file_search.KIND:
        return ToolChoice("auto")  # the server searches in any case
    if kind in ("function", "custom"):
        return ToolChoice("required", _chosen_name(choice, "tool_choice"))
    mode, tools = choice.get("mode", "auto"), choice.get("tools")
    if mode not in ("auto", "required") or not isinstance(tools, list):
        raise refusal(
            "tool_choice of the type allowed_tools has no mode (auto or required) or no list of tools; send both",
            "tool_choice",
        )
    check_entries("tool_choice.tools", tools, "allowed_tools", "tool_choice")
    named = [tool for tool in tools if _type(tool) in ("function", "custom")]
    names = (_chosen_name(tool, f"tool_choice.tools[{index}]") for index, tool in enumerate(named))
    return ToolChoice(mode, None, frozenset(names))


def _walk(tools: Sequence[Any]) -> Iterator[tuple[Mapping[str, Any], str | None, str]]:
    """Each function and custom tool, with its namespace and its path in the body."""
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        if not isinstance(tool, Mapping):
            raise refusal(f"{where} is not an object; send one with a type", where)
        if _type(tool) != "namespace":
            if not _is_ignored(tool) and not file_search.is_file_search(tool):
                yield tool, None, where
            continue
        name, inner = tool.get("name"), tool.get("tools")
        if not isinstance(name, str) or not isinstance(inner, list):
            raise refusal(f"{where} has no name or no list of tools; send both", where)
        for position, one in enumerate(inner):
            if _may_be_in_namespace(one):
                yield one, name, f"{where}.tools[{position}]"


def _as_function(tool: Mapping[str, Any], namespace: str | None, where: str) -> FunctionTool:
    name, description = tool.get("name"), tool.get("description")
    if isinstance(name, str):
        name = shown_name(name, namespace)
    if _type(tool) == "function":
        return FunctionTool(name, description, tool.get("parameters"), tool.get("strict"), where)
    return custom_tool(name, description, tool.get("format"), where)


def _is_ignored(tool: Any) -> bool:
    return isinstance(tool, Mapping) and _type(tool) not in (
        "function",
        "custom",
        "namespace",
        file_search.KIND,
    )


def _may_be_called(tool: Any) -> bool:
    """Whether the tool, or one in its namespace, is not ignored."""
    inner = tool.get("tools") if _type(tool) == "namespace" else None
    if isinstance(inner, list):
        return any(map(_may_be_in_namespace, inner))
    return not _is_ignored(tool)


def _may_be_in_namespace(tool: Any) -> bool:
    return _type(tool) in ("function", "custom")


def _type(value: Any) -> str:
    kind = value.get("type") if isinstance(value, Mapping) else None
    return kind if isinstance(kind, str) else ""


def _chosen_name(choice: Mapping[str, Any], where: str) -> str:
    name, namespace = choice.get("name"), choice.get("namespace")
    if not isinstance(name, str):
        raise refusal(f"{where} has no name of a tool; send one", where)
    return shown_name(name, namespace if isinstance(namespace, str) else None)
