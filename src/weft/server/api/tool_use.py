"""Validates the tools and tool_choice of a request, and builds the grammar that its answers must follow."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from weft.request import Grammar
from weft.server.api.closed_schema import closed
from weft.server.errors import refusal
from weft.text.answer_reader import AnswerSyntax
from weft.text.model_text import ModelText
from weft.text.tool_grammar import Tool, after_reasoning, forced_calls, optional_calls

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True)
class ToolUse:
    """The tools of one request, and whether the model must call them."""

    tools: tuple[Tool, ...] = ()
    """The tools that the model may call: none, all, or the one that tool_choice names."""
    template_tools: list[dict[str, Any]] | None = None
    """The tools for the chat template: all tools of the request, unchanged."""
    is_forced: bool = False
    is_named: bool = False
    max_calls: int | None = None

    def answer_form(self, text: ModelText, prompt: Sequence[int]) -> AnswerSyntax | None:
        """The form of answers to this prompt; None for plain text."""
        reasoning = text.reasoning
        if reasoning is None and not self.tools:
            return None
        return AnswerSyntax(
            reasoning,
            starts_in_reasoning=text.prompt_opens_reasoning(prompt),
            tool_format=text.tool_format if self.tools else None,
            tool_names=frozenset(tool.name for tool in self.tools),
            max_calls=self.max_calls,
        )

    def grammar(self, answer: Grammar | None, form: AnswerSyntax | None, text: ModelText) -> Grammar | None:
        """The grammar of whole answers. `answer` is the grammar of content.

        If a call is forced, an answer has no content. Otherwise it has either calls or content.
        """
        if form is None or (not self.tools and answer is None):
            return answer
        if not self.tools:
            assert answer is not None
            return after_reasoning(answer, form, text.tokenizer)
        # A model without training for tools repeats forced calls forever, so it may make only one call.
        is_single = text.uses_weft_tool_prompt
        if self.is_forced:
            return forced_calls(self.tools, form, text.tokenizer, is_single_call=is_single)
        if answer is not None and text.tool_format.has_unmarked_calls:
            raise refusal(
                "response_format and tools cannot be combined with this model: its tool calls look like any JSON; "
                "set tool_choice to none or required",
                "response_format",
                "unsupported",
            )
        return optional_calls(self.tools, form, text.tokenizer, answer, is_single_call=is_single)


NO_TOOLS = ToolUse()


@dataclass(frozen=True)
class ToolChoice:
    """Which tools an answer must or may call."""

    mode: Literal["auto", "none", "required"] = "auto"
    name: str | None = None
    """The only tool that may be called. It must be called."""
    allowed: frozenset[str] | None = None
    """The tools that may be called. None: all."""


@dataclass(frozen=True)
class FunctionTool:
    """A tool as a client describes it, not checked."""

    name: Any
    description: Any
    parameters: Any
    """A JSON schema; None: no parameters."""
    strict: Any
    where: str
    """The path of the tool in the body, for errors."""
    parameters_field: str = "parameters"
    arguments_grammar: str | None = None
    """A Lark grammar of the arguments, as they are written in JSON. It is enforced if the tool is strict."""
    given: dict[str, Any] | None = None
    """The tool in the form of the OpenAI API, if the client sent that. Templates get it unchanged."""

    def for_template(self) -> dict[str, Any]:
        if self.given is not None:
            return self.given
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {
            "type": "function",
            "function": {key: value for key, value in function.items() if value is not None},
        }


def chosen_tools(
    given: Sequence[FunctionTool], tool_choice: ToolChoice, may_be_parallel: bool | None
) -> ToolUse:
    """Checks the tools of a request, and returns those that the model may call. Raises ApiError if tools are invalid, or
    do not suit the choice."""
    tools = _checked_tools(given)
    template_tools = [one.for_template() for one in given]
    choice, name = tool_choice.mode, tool_choice.name
    if not tools:
        if name is not None or choice == "required":
            raise refusal(
                "tool_choice requires a call, but the request has no tools; send tools", "tool_choice"
            )
        return NO_TOOLS
    if choice == "none":
        return NO_TOOLS
    if tool_choice.allowed is not None:
        tools = tuple(tool for tool in tools if tool.name in tool_choice.allowed)
    if name is not None:
        tools = tuple(tool for tool in tools if tool.name == name)
        if not tools:
            raise refusal(
                f"tool_choice names {name!r:.80}, which is not in tools; send the name of a tool",
                "tool_choice",
            )
    is_forced = name is not None or choice == "required"
    is_single = name is not None or may_be_parallel is False
    return ToolUse(tools, template_tools, is_forced, name is not None, 1 if is_single else None)


def _checked_tools(given: Sequence[FunctionTool]) -> tuple[Tool, ...]:
    checked: dict[str, Tool] = {}
    for one in given:
        tool = _checked(one)
        if tool.name in checked:
            raise refusal(
                f"{one.where} has the name {tool.name!r}, as an earlier tool has; names must be unique",
                f"{one.where}.name",
            )
        checked[tool.name] = tool
    return tuple(checked.values())


def _checked(tool: FunctionTool) -> Tool:
    where, name, strict = tool.where, tool.name, tool.strict
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise refusal(
            f"{where}.name is {str(name)!r:.80}; allowed: 1 to 64 letters, digits, _ and -", f"{where}.name"
        )
    if tool.description is not None and not isinstance(tool.description, str):
        raise refusal(f"{where}.description is not a string; send one", f"{where}.description")
    if strict is not None and not isinstance(strict, bool):
        raise refusal(f"{where}.strict is {str(strict)!r:.80}; allowed: true, false", f"{where}.strict")
    schema = _schema(tool.parameters, f"{where}.{tool.parameters_field}")
    return Tool(name, schema, bool(strict), tool.arguments_grammar)


def _schema(parameters: Any, where: str) -> Mapping[str, Any]:
    if parameters is None or parameters == {}:
        return _NO_PARAMETERS
    if not isinstance(parameters, Mapping) or parameters.get("type", "object") != "object":
        raise refusal(f"{where} is not a JSON schema of the type object; send one", where)
    try:
        return closed({"type": "object", **parameters})
    except ValueError as error:
        raise refusal(f"{where} {error}", where) from None
