"""Closes the objects of a JSON schema: an object that names its properties gets `"additionalProperties": false`.

JSON Schema allows additional properties by default. A model that may add properties sometimes never stops, and clients
discard them. llama.cpp and xgrammar close objects too. `"additionalProperties": true` in the schema keeps an object
open.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from weft.request import MAX_GRAMMAR_LENGTH

_MAPPING_KEYWORDS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LIST_KEYWORDS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_SINGLE_KEYWORDS = ("items", "additionalProperties", "contains", "not", "if", "then", "else")
_OPENING_KEYWORDS = frozenset(
    ("additionalProperties", "unevaluatedProperties", "patternProperties", "propertyNames")
)
_COMBINING_KEYWORDS = frozenset(
    ("$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "not", "if", "then", "else", "dependentSchemas")
)
_MAX_LEVELS = 400
"""The JSON encoder and decoder fail at about a thousand levels of the call stack."""
_TOO_DEEP = f"is nested more than {_MAX_LEVELS} levels deep; use fewer levels"


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    """A copy of the schema with closed objects. Raises ValueError if the schema is nested too deeply or too long.

    A schema that describes one object in several places (an allOf of two) stays unchanged: each place would forbid the
    properties of the other.
    """
    try:
        written = msgspec.json.encode(schema)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    # The length is checked first, because it limits the cost of the code below.
    if len(written) > MAX_GRAMMAR_LENGTH and (length := len(written.decode())) > MAX_GRAMMAR_LENGTH:
        raise ValueError(f"has {length} characters as JSON; allowed: at most {MAX_GRAMMAR_LENGTH}")
    _check_depth(schema)
    copy: dict[str, Any] = msgspec.json.decode(written)
    parts = list(_parts(copy))
    if any(map(_is_merged, parts)):
        return copy
    for part in parts:
        if (
            isinstance(part.get("properties"), dict)
            and _OPENING_KEYWORDS.isdisjoint(part)
            and _is_satisfiable(part)
        ):
            part["additionalProperties"] = False
    return copy


def _check_depth(schema: dict[str, Any]) -> None:
    level: list[Any] = [schema]
    for _ in range(_MAX_LEVELS):
        inner = [part.values() if isinstance(part, dict) else part for part in level]
        level = [one for branches in inner for one in branches if isinstance(one, dict | list)]
        if not level:
            return
    raise ValueError(_TOO_DEEP)


def _parts(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The schema and all its subschemas, without recursion: the client chooses the depth."""
    stack: list[Any] = [schema]
    while stack:
        part = stack.pop()
        if not isinstance(part, dict):
            continue
        yield part
        for name in _MAPPING_KEYWORDS:
            if isinstance(part.get(name), dict):
                stack += part[name].values()
        for name in _LIST_KEYWORDS:
            if isinstance(part.get(name), list):
                stack += part[name]
        stack += [part[name] for name in _SINGLE_KEYWORDS if name in part]


def _is_merged(part: dict[str, Any]) -> bool:
    """Whether several schemas describe the same object. Closing one would forbid the properties of the others."""
    branches = part.get("allOf")
    if isinstance(branches, list) and len(branches) > 1:
        return True
    return ("properties" in part or "required" in part) and not _COMBINING_KEYWORDS.isdisjoint(part)


def _is_satisfiable(part: dict[str, Any]) -> bool:
    """Whether an object with only the named properties can be valid. Malformed schemas are refused by the compiler."""
    required, least = part.get("required", []), part.get("minProperties", 0)
    return (
        isinstance(required, list)
        and all(isinstance(name, str) and name in part["properties"] for name in required)
        and isinstance(least, int | float)
        and least <= len(part["properties"])
    )
