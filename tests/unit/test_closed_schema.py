"""Objects with named properties are closed, unless the schema opens them or would change its meaning."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from weft.server.api import closed_schema
from weft.server.api.closed_schema import closed

A: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
B: dict[str, Any] = {"type": "object", "properties": {"b": {"type": "string"}}}
SHUT_A, SHUT_B = ({**one, "additionalProperties": False} for one in (A, B))


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (A, SHUT_A),
        (
            {"type": "object", "properties": {}},
            {"type": "object", "properties": {}, "additionalProperties": False},
        ),
        ({"type": "array", "items": A}, {"type": "array", "items": SHUT_A}),
        ({"type": "array", "items": [A, B]}, {"type": "array", "items": [SHUT_A, SHUT_B]}),
        ({"anyOf": [A, B, {"type": "null"}]}, {"anyOf": [SHUT_A, SHUT_B, {"type": "null"}]}),
        ({"$ref": "#/$defs/a", "$defs": {"a": A}}, {"$ref": "#/$defs/a", "$defs": {"a": SHUT_A}}),
        ({"additionalProperties": A}, {"additionalProperties": SHUT_A}),
        # A property may have the name of a keyword.
        (
            {"properties": {"properties": A, "allOf": B}},
            {"properties": {"properties": SHUT_A, "allOf": SHUT_B}, "additionalProperties": False},
        ),
        # pydantic describes a field that is an object like this.
        ({"items": {"allOf": [A], "title": "x"}}, {"items": {"allOf": [SHUT_A], "title": "x"}}),
    ],
)
def test_objects_with_properties_are_closed_at_every_level(schema: Any, expected: Any) -> None:
    before = copy.deepcopy(schema)
    assert closed(schema) == expected
    assert schema == before, "the input must not change: the chat template uses it"


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {"const": A},
        {**A, "additionalProperties": True},
        {**A, "additionalProperties": {"type": "integer"}},
        {**A, "patternProperties": {"^x": {}}},
        {**A, "unevaluatedProperties": False},
        {**A, "required": ["a", "elsewhere"]},
        {**A, "minProperties": 2},
    ],
)
def test_open_or_otherwise_unsatisfiable_objects_stay_open(schema: Any) -> None:
    assert closed(schema) == schema


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [A, B]},
        {**A, "anyOf": [B, {"required": ["c"]}]},
        {**A, "$ref": "#/$defs/b", "$defs": {"b": B}},
        {**A, "if": {"properties": {"a": {"const": "x"}}}, "then": B},
        {"items": A, "prefixItems": [{"allOf": [A, B]}]},
        {"required": ["b"], "oneOf": [A, {"properties": {"b": {}}}]},
    ],
)
def test_a_schema_with_combined_objects_stays_unchanged(schema: Any) -> None:
    assert closed(schema) == schema


@pytest.mark.parametrize(
    "broken", [{"properties": 3}, {"properties": {"a": 3}, "required": 3}, {"anyOf": 3, "items": "x"}]
)
def test_malformed_schemas_are_not_refused_here(broken: Any) -> None:
    assert closed(broken) == broken or closed(broken) == {**broken, "additionalProperties": False}


def test_a_schema_that_is_too_long_is_refused_before_it_is_walked_or_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def walk(schema: Any) -> None:
        raise AssertionError("the length is checked first")

    monkeypatch.setattr(closed_schema, "_check_depth", walk)
    schema = {"type": "object", "properties": {f"property{n}": {"type": "string"} for n in range(60_000)}}
    with pytest.raises(ValueError, match=r"has \d+ characters as JSON; allowed: at most \d+"):
        closed(schema)


def test_a_schema_that_is_too_deep_to_encode_is_refused() -> None:
    deep: Any = 1
    for _ in range(10_000):
        deep = [deep]
    with pytest.raises(ValueError, match="400 levels"):
        closed({"default": deep})
