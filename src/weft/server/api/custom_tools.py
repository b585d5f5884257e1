"""Reads custom tools of the OpenAI API: their input is a text, which may have to follow a grammar."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from weft.request import MAX_GRAMMAR_LENGTH
from weft.server.api.tool_use import FunctionTool
from weft.server.errors import refusal
from weft.text.custom_calls import INPUT, INPUT_ONLY
from weft.text.json_string_grammar import NotRewritableError, in_json_string


def listed_tools(tools: Iterable[FunctionTool]) -> list[FunctionTool]:
    """The tools as a list. Raises ApiError as soon as their grammars together are too long: `tools` rewrites the grammar of
    each tool when it is read, which takes time."""
    found: list[FunctionTool] = []
    length = 0
    for tool in tools:
        found.append(tool)
        length += len(tool.arguments_grammar or "")
        if length > MAX_GRAMMAR_LENGTH:
            message = f"the grammars of the tools have more than {MAX_GRAMMAR_LENGTH} characters together; shorten them"
            raise refusal(message, f"{tool.where}.format.definition")
    return found


def custom_tool(name: Any, description: Any, form: Any, where: str) -> FunctionTool:
    """Makes the function that the model sees instead of a custom tool. `chosen_tools` checks it. `form` is the field
    `format` of the tool."""
    if form is None or (isinstance(form, Mapping) and form.get("type") == "text"):
        return FunctionTool(name, description, INPUT_ONLY, False, where)
    return _with_grammar(FunctionTool(name, description, INPUT_ONLY, True, where), form)


def _with_grammar(tool: FunctionTool, form: Any) -> FunctionTool:
    """The function with a grammar of its input. A regex becomes a pattern, Lark is rewritten for a JSON string."""
    where = f"{tool.where}.format"
    kind = form.get("type") if isinstance(form, Mapping) else None
    # In chat completions the grammar is an object inside `format`. In the Responses API its fields are in `format`.
    given = form.get("grammar", form) if isinstance(form, Mapping) else None
    given = given if isinstance(given, Mapping) else {}
    definition, syntax = given.get("definition"), given.get("syntax")
    if kind != "grammar" or not isinstance(definition, str) or len(definition) > MAX_GRAMMAR_LENGTH:
        raise refusal(
            f'{where} is neither {{"type": "text"}} nor a grammar with a syntax and a definition; send one',
            where,
        )
    if syntax == "regex":
        pattern = {"type": "string", "pattern": f"^(?:{definition})$"}
        return replace(tool, parameters={**INPUT_ONLY, "properties": {INPUT: pattern}})
    if syntax != "lark":
        raise refusal(f"{where}.syntax is {syntax!r:.80}; allowed: lark, regex", f"{where}.syntax")
    try:
        body = in_json_string(definition)
    except NotRewritableError as error:
        raise refusal(f"{where}.definition: {error}", f"{where}.definition") from None
    rule = f"The input must follow this Lark grammar:\n{definition}"
    return replace(
        tool,
        description=f"{tool.description}\n{rule}" if tool.description else rule,
        arguments_grammar=f'start: "{{\\"{INPUT}\\": \\"" body "\\"}}"\nbody: %lark {{\n{body}\n}}',
    )
