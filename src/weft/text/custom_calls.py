"""Calls of custom tools. The input of such a tool is a text, but models call functions: the model sees and writes a
function with one argument, the string `input`."""

from __future__ import annotations

import json
from typing import Any

INPUT = "input"
"""The name of the argument."""
INPUT_ONLY: dict[str, Any] = {
    "type": "object",
    "properties": {INPUT: {"type": "string"}},
    "required": [INPUT],
    "additionalProperties": False,
}


def custom_arguments(text: str) -> str:
    """The arguments of a call with this input, as the model writes them."""
    return json.dumps({INPUT: text}, ensure_ascii=False)


def custom_input(arguments: str) -> str:
    """The input of a call. `arguments` may be incomplete, or not the object that the function asks for."""
    try:
        value = json.loads(arguments, strict=False)
    except (ValueError, RecursionError):
        return _cut_input(arguments)
    if isinstance(value, dict) and isinstance(text := value.get(INPUT), str):
        return text
    texts = list(value.values()) if isinstance(value, dict) else []
    return texts[0] if len(texts) == 1 and isinstance(texts[0], str) else arguments


def _cut_input(arguments: str) -> str:
    """The input so far, from incomplete arguments: the string after `"input":`, without an incomplete escape at its end."""
    _, found, rest = arguments.partition(f'"{INPUT}"')
    _, found, rest = rest.partition('"')
    if not found:
        return arguments
    for _ in range(6):  # drops an incomplete escape; the longest is \uXXXX
        try:
            return str(json.loads(f'"{rest}"', strict=False))
        except ValueError:
            rest = rest[:-1]
    return arguments
