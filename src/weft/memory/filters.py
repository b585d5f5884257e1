"""Filters over the attributes of files: comparisons, joined by `and` and `or`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from weft.errors import InvalidRequestError

Attributes = Mapping[str, str | float | bool]
Filter = Callable[[Attributes], bool]

MAX_COMPARISONS = 256
_MAX_DEPTH = 16
_MAX_VALUES = 1024
_COMPARISONS = ("eq", "ne", "gt", "gte", "lt", "lte", "in", "nin")
_COMPOUNDS = ("and", "or")


def parsed_filter(given: Any, where: str = "filters") -> Filter:
    """Makes a function of a filter in JSON. Raises InvalidRequestError if `given` is not a filter."""
    return _Parser().parse(given, where, 1)


class _Parser:
    def __init__(self) -> None:
        self._num_comparisons = 0

    def parse(self, given: Any, where: str, depth: int) -> Filter:
        kind = given.get("type") if isinstance(given, Mapping) else None
        if kind in _COMPOUNDS:
            return self._compound(given, kind, where, depth)
        if kind in _COMPARISONS:
            self._num_comparisons += 1
            if self._num_comparisons > MAX_COMPARISONS:
                raise _error(where, f"is comparison {self._num_comparisons}; allowed: {MAX_COMPARISONS}")
            return _comparison(given, kind, where)
        allowed = ", ".join((*_COMPARISONS, *_COMPOUNDS))
        raise _error(f"{where}.type", f"is {str(kind)!r:.80}; allowed: {allowed}")

    def _compound(self, given: Mapping[str, Any], kind: str, where: str, depth: int) -> Filter:
        filters = given.get("filters")
        if not isinstance(filters, list) or not filters:
            raise _error(f"{where}.filters", "is not a list of filters; send at least one")
        if depth > _MAX_DEPTH:
            raise _error(where, f"has more than {_MAX_DEPTH} levels; use fewer")
        parts = [self.parse(one, f"{where}.filters[{index}]", depth + 1) for index, one in enumerate(filters)]
        join = all if kind == "and" else any
        return lambda attributes: join(part(attributes) for part in parts)


def _comparison(given: Mapping[str, Any], kind: str, where: str) -> Filter:
    """Makes a function of one comparison."""
    key, value = given.get("key"), given.get("value")
    if not isinstance(key, str):
        raise _error(f"{where}.key", "is missing or not a text; send the name of an attribute")
    if kind in ("in", "nin"):
        if not isinstance(value, list) or len(value) > _MAX_VALUES or not all(map(_is_plain, value)):
            raise _error(
                f"{where}.value", f"is not a list of at most {_MAX_VALUES} texts, numbers or booleans"
            )
        values = {(_kind(one), one) for one in value}
        is_in = kind == "in"
        return lambda attributes: (
            (key in attributes and (_kind(attributes[key]), attributes[key]) in values) == is_in
        )
    if not _is_plain(value):
        raise _error(f"{where}.value", "is not a text, a number or a boolean; send one")
    if kind in ("eq", "ne"):
        is_equal = kind == "eq"
        return lambda attributes: (
            (key in attributes and _kind(attributes[key]) is _kind(value) and attributes[key] == value)
            == is_equal
        )
    return _ordering(key, kind, value, where)


def _ordering(key: str, kind: str, value: Any, where: str) -> Filter:
    """A comparison with gt, gte, lt or lte. Values of another type do not pass."""
    if isinstance(value, bool):
        raise _error(f"{where}.value", f"is a boolean, which has no order; use eq or ne instead of {kind}")
    compare: Callable[[Any, Any], bool] = {
        "gt": lambda a, b: a > b,
        "gte": lambda a, b: a >= b,
        "lt": lambda a, b: a < b,
        "lte": lambda a, b: a <= b,
    }[kind]

    def passes(attributes: Attributes) -> bool:
        found = attributes.get(key)
        return found is not None and _kind(found) is _kind(value) and compare(found, value)

    return passes


def _kind(value: Any) -> type:
    """The type by which values are compared. In Python True equals 1; in filters a boolean equals no number."""
    return bool if isinstance(value, bool) else str if isinstance(value, str) else float


def _is_plain(value: Any) -> bool:
    return isinstance(value, str | float | int)


def _error(where: str, what: str) -> InvalidRequestError:
    return InvalidRequestError(f"{where} {what}", field=where)
