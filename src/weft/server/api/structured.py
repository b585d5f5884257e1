"""Structured output: converts the fields of several APIs into one grammar.

They are OpenAI's `response_format`, vLLM's `structured_outputs` and `guided_*`, and llama.cpp's `grammar` and
`json_schema`. `GrammarChecker` finds errors in the grammar itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from weft.request import Grammar
from weft.server.api.closed_schema import closed
from weft.server.api.schema import GenerationRequest
from weft.server.errors import ApiError, refusal

ANY_OBJECT: dict[str, Any] = {"type": "object"}

# The types of a response_format, and the fields that each type allows.
_FORMATS: dict[str, tuple[str, ...]] = {
    "text": (),
    "json_object": ("schema",),
    "json_schema": ("json_schema", "schema"),
    "regex": ("pattern", "regex"),
    "choice": ("choices", "choice"),
    "grammar": ("grammar",),
}
_FIELDS = frozenset(name for names in _FORMATS.values() for name in names)
# The fields of vLLM and llama.cpp, and the kind of grammar that each holds.
_OTHER_FIELDS = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "grammar": "grammar",
    "json_schema": "json",
}
_STRUCTURED_OUTPUTS = ("json", "json_object", "regex", "choice", "grammar")


def requested_grammar(api_request: GenerationRequest) -> Grammar | None:
    """The grammar of a request, or None. Raises ApiError if its fields are invalid or contradict each other."""
    grammars = list(_requested_grammars(api_request))
    for name, grammar in grammars[1:]:
        if grammar != grammars[0][1]:
            raise refusal(f"{grammars[0][0]} and {name} both define the format of the answer; send one", name)
    return grammars[0][1] if grammars else None


def grammar_param(api_request: GenerationRequest) -> str:
    """The name of the field for errors about the grammar; "tools" if the grammar is made from tools."""
    names = ("structured_outputs", *_OTHER_FIELDS, "response_format")
    return next((name for name in names if getattr(api_request, name) is not None), "tools")


def _requested_grammars(api_request: GenerationRequest) -> Iterator[tuple[str, Grammar]]:
    if api_request.response_format is not None:
        grammar = _grammar_of_format(api_request.response_format)
        if grammar is not None:
            yield "response_format", grammar
    if api_request.structured_outputs is not None:
        yield "structured_outputs", _grammar_of_structured_outputs(api_request.structured_outputs)
    for name, kind in _OTHER_FIELDS.items():
        value = getattr(api_request, name)
        # Clients of llama.cpp send "" for no grammar, so "" is ignored in these fields. In others, an empty value is not.
        if value or (value is not None and kind != "grammar"):
            yield name, _grammar(kind, value, name)


def _grammar_of_format(form: Mapping[str, Any]) -> Grammar | None:
    kind = form.get("type")
    if not isinstance(kind, str) or kind not in _FORMATS:
        raise _invalid_value("response_format.type", f"is {kind!r:.80}; allowed: {', '.join(_FORMATS)}")
    given = {name for name in _FIELDS if form.get(name) is not None}
    if others := sorted(given.difference(_FORMATS[kind])):
        raise _invalid_value(
            "response_format",
            f"has the type {kind} and the field {others[0]}, which belongs to another type; remove it",
        )
    if kind == "text":
        return None
    if kind == "json_object":
        schema = form["schema"] if "schema" in given else ANY_OBJECT  # llama.cpp allows a schema here
        is_schema = isinstance(schema, dict)
        return grammar_of_schema({**ANY_OBJECT, **schema} if is_schema else schema, "response_format.schema")
    if kind == "json_schema":
        return _grammar_of_schema_format(form)
    name = next((name for name in _FORMATS[kind] if name in given), _FORMATS[kind][0])
    return _grammar(kind, form.get(name), f"response_format.{name}")


def _grammar_of_schema_format(form: Mapping[str, Any]) -> Grammar:
    """Accepts OpenAI's format, and llama.cpp's with the schema one level higher. The schema is enforced even without
    `strict`."""
    outer = form.get("json_schema")
    if outer is None:
        return grammar_of_schema(form.get("schema"), "response_format.schema")
    if not isinstance(outer, dict):
        raise _invalid_value("response_format.json_schema", "is not an object; send one with name and schema")
    return grammar_of_schema(outer.get("schema"), "response_format.json_schema.schema")


def _grammar_of_structured_outputs(form: Mapping[str, Any]) -> Grammar:
    given = [name for name in _STRUCTURED_OUTPUTS if form.get(name) not in (None, False)]
    if len(given) != 1:
        found = " and ".join(given) or "none of its fields"
        raise _invalid_value(
            "structured_outputs", f"has {found}; allowed: one of {', '.join(_STRUCTURED_OUTPUTS)}"
        )
    if given[0] == "json_object":
        return grammar_of_schema(ANY_OBJECT, "structured_outputs")
    return _grammar(given[0], form[given[0]], f"structured_outputs.{given[0]}")


def _grammar(kind: str, value: Any, param: str) -> Grammar:
    if kind == "json":
        return grammar_of_schema(value, param)
    if kind == "choice":
        return _grammar_of_choices(value, param)
    if not isinstance(value, str):
        raise _invalid_value(param, "is missing or not a string; send a string")
    return Grammar("regex" if kind == "regex" else "lark", value)


def grammar_of_schema(schema: Any, param: str) -> Grammar:
    """The grammar of a JSON schema. Raises ApiError if `schema` is not a JSON schema."""
    if isinstance(schema, str):  # vLLM accepts a schema as a JSON string
        try:
            schema = msgspec.json.decode(schema)
        except (ValueError, RecursionError) as error:
            raise _invalid_value(param, f"is text that is not JSON: {error}") from None
    if not isinstance(schema, dict):
        raise _invalid_value(param, "is not a JSON schema; allowed: an object")
    try:
        schema = closed(schema)
    except ValueError as error:
        raise _invalid_value(param, str(error)) from None
    # Keys are not sorted: the order of the properties in the schema is their order in the answer.
    return Grammar("json_schema", msgspec.json.encode(schema).decode())


def _grammar_of_choices(choices: Any, param: str) -> Grammar:
    is_list = isinstance(choices, list) and choices
    if not is_list or not all(isinstance(choice, str) for choice in choices):
        raise _invalid_value(param, "is not a list of strings; allowed: at least one")
    return Grammar("choice", msgspec.json.encode(choices).decode())


def _invalid_value(param: str, message: str) -> ApiError:
    return refusal(f"{param} {message}", param.partition(".")[0])
