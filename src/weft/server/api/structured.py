"""What an answer must look like: from the fields that clients of several servers send to one grammar.

Besides OpenAI's `response_format` these are vLLM's (`structured_outputs`, `guided_*`) and llama.cpp's (`grammar`,
`json_schema`). Whether the grammar is any good is found out where it is compiled.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from weft.request import Grammar
from weft.server.api.closed_schema import closed
from weft.server.api.schema import GenerationRequest
from weft.server.errors import ApiError

ANY_OBJECT: dict[str, Any] = {"type": "object"}

# The types of a response_format, and which of its fields belong to each.
_FORMATS: dict[str, tuple[str, ...]] = {
    "text": (),
    "json_object": ("schema",),
    "json_schema": ("json_schema", "schema"),
    "regex": ("pattern", "regex"),
    "choice": ("choices", "choice"),
    "grammar": ("grammar",),
}
_FIELDS = frozenset(name for names in _FORMATS.values() for name in names)
# What the fields of other servers hold.
_OTHERS = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "grammar": "grammar",
    "json_schema": "json",
}
_STRUCTURED_OUTPUTS = ("json", "json_object", "regex", "choice", "grammar")


def grammar_of(asked: GenerationRequest) -> Grammar | None:
    """The grammar that a request asks for; None where it leaves the model free. Raises ApiError for what contradicts
    itself or is none."""
    wishes = list(_wishes(asked))
    for name, grammar in wishes[1:]:
        if grammar != wishes[0][1]:
            raise ApiError(
                400,
                f"{wishes[0][0]} and {name} both say what the answer must look like; send one",
                param=name,
                code="invalid_value",
            )
    return wishes[0][1] if wishes else None


def param_of(asked: GenerationRequest) -> str:
    """The field that errors about the grammar are told of; tools where it is made of those."""
    names = ("structured_outputs", *_OTHERS, "response_format")
    return next((name for name in names if getattr(asked, name) is not None), "tools")


def _wishes(asked: GenerationRequest) -> Iterator[tuple[str, Grammar]]:
    if asked.response_format is not None:
        grammar = _of_format(asked.response_format)
        if grammar is not None:
            yield "response_format", grammar
    if asked.structured_outputs is not None:
        yield "structured_outputs", _of_structured_outputs(asked.structured_outputs)
    for name, kind in _OTHERS.items():
        value = getattr(asked, name)
        if value or (value is not None and kind != "grammar"):  # llama.cpp's clients send "" for no grammar
            yield name, _of(kind, value, name)


def _of_format(form: Mapping[str, Any]) -> Grammar | None:
    kind = form.get("type")
    if not isinstance(kind, str) or kind not in _FORMATS:
        raise _wrong("response_format.type", f"is {kind!r:.80}; allowed: {', '.join(_FORMATS)}")
    given = {name for name in _FIELDS if form.get(name) is not None}
    if others := sorted(given.difference(_FORMATS[kind])):
        raise _wrong("response_format", f"has the type {kind} and {others[0]} beside it; send one")
    if kind == "text":
        return None
    if kind == "json_object":
        schema = form["schema"] if "schema" in given else ANY_OBJECT  # llama.cpp's way to say more about it
        is_schema = isinstance(schema, dict)
        return _of_schema({**ANY_OBJECT, **schema} if is_schema else schema, "response_format.schema")
    if kind == "json_schema":
        return _of_schema_format(form)
    name = next((name for name in _FORMATS[kind] if name in given), _FORMATS[kind][0])
    return _of(kind, form.get(name), f"response_format.{name}")


def _of_schema_format(form: Mapping[str, Any]) -> Grammar:
    """OpenAI's form, or llama.cpp's with the schema one level higher. `strict` or not, the schema is enforced."""
    outer = form.get("json_schema")
    if outer is None:
        return _of_schema(form.get("schema"), "response_format.schema")
    if not isinstance(outer, dict):
        raise _wrong("response_format.json_schema", "is not an object with name and schema")
    return _of_schema(outer.get("schema"), "response_format.json_schema.schema")


def _of_structured_outputs(form: Mapping[str, Any]) -> Grammar:
    given = [name for name in _STRUCTURED_OUTPUTS if form.get(name) not in (None, False)]
    if len(given) != 1:
        found = " and ".join(given) or "none of them"
        raise _wrong("structured_outputs", f"has {found}; allowed: one of {', '.join(_STRUCTURED_OUTPUTS)}")
    if given[0] == "json_object":
        return _of_schema(ANY_OBJECT, "structured_outputs")
    return _of(given[0], form[given[0]], f"structured_outputs.{given[0]}")


def _of(kind: str, value: Any, param: str) -> Grammar:
    if kind == "json":
        return _of_schema(value, param)
    if kind == "choice":
        return _of_choices(value, param)
    if not isinstance(value, str):
        raise _wrong(param, "is missing, or no text")
    return Grammar("regex" if kind == "regex" else "lark", value)


def _of_schema(schema: Any, param: str) -> Grammar:
    if isinstance(schema, str):  # vLLM takes one that is written out
        try:
            schema = msgspec.json.decode(schema)
        except (ValueError, RecursionError) as error:
            raise _wrong(param, f"is text that is not JSON: {error}") from None
    if not isinstance(schema, dict):
        raise _wrong(param, "is not a JSON schema; allowed: an object")
    try:
        schema = closed(schema)
    except ValueError as error:
        raise _wrong(param, str(error)) from None
    # Not sorted: an answer has its properties in the order in which the schema names them.
    return Grammar("json_schema", msgspec.json.encode(schema).decode())


def _of_choices(choices: Any, param: str) -> Grammar:
    is_list = isinstance(choices, list) and choices
    if not is_list or not all(isinstance(choice, str) for choice in choices):
        raise _wrong(param, "is not a list of strings; allowed: at least one")
    return Grammar("choice", msgspec.json.encode(choices).decode())


def _wrong(param: str, message: str) -> ApiError:
    return ApiError(400, f"{param} {message}", param=param.partition(".")[0], code="invalid_value")
