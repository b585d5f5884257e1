"""Converts frozen dataclasses to JSON lines and back, to pass them to another process without pickle."""

from __future__ import annotations

import dataclasses
import json
import types
from enum import Enum
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")


def to_line(value: Any) -> bytes:
    """A dataclass as one line of JSON. Its fields may be plain values, tuples, enums and such dataclasses."""
    return json.dumps(dataclasses.asdict(value), default=_value_of).encode() + b"\n"


def from_line(kind: type[T], line: bytes) -> T:
    """The inverse of `to_line`."""
    built: T = _build(kind, json.loads(line))
    return built


def _value_of(value: object) -> object:
    if isinstance(value, Enum):
        return value.value
    raise TypeError(f"{type(value).__name__} is not plain data")


def _build(kind: Any, value: Any) -> Any:
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return None if value is None else _build(next(p for p in parts if p is not types.NoneType), value)
    if origin is tuple:
        each = [parts[0]] * len(value) if parts[-1] is Ellipsis else parts
        return tuple(_build(part, item) for part, item in zip(each, value, strict=True))
    if dataclasses.is_dataclass(kind):
        fields = get_type_hints(kind)
        return kind(**{name: _build(fields[name], item) for name, item in value.items()})  # type: ignore[operator]
    if origin is Literal:
        return value
    return kind(value)
