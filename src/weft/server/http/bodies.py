"""Bodies of requests: read into what they ask without holding up the event loop, and all together within a bound.

A parser keeps the interpreter to itself: 16 MB of small numbers take 0.4 s, in which no stream moves, and become 25 times
as much memory. Large bodies are therefore read in a process of their own (this module, run), one at a time; what comes
back from there is what the server can use, or the refusal.
"""

from __future__ import annotations

import gc
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

from weft.errors import InvalidRequestError
from weft.server.api import schema
from weft.server.errors import ApiError
from weft.server.text_work.worker import Workers, answer_all, ignore_signals, packed

_SMALL_BYTES = 256 << 10
"""Up to this size reading takes a few milliseconds at worst."""
_MAX_VALUES = 1 << 18
"""Numbers, strings, lists and objects in a large body: to hand over more would take the time that was to be saved."""
_WEIGHT = 4
"""A list, an object, and each entry of an object count as so many values: they take as long."""
_SECONDS_PER_BYTE = 2.5e-8
_SECONDS = 60.0

T = TypeVar("T", bound=msgspec.Struct)


async def whole_body(request: Request) -> bytearray:
    """All of it, once: `request.body()` joins what it collected, and keeps it as long as the request."""
    body = bytearray()
    async for part in request.stream():
        body += part
    return body


class _Read(msgspec.Struct, frozen=True, tag=True):
    fields: msgspec.Raw
    unknown: list[str]


class _Refused(msgspec.Struct, frozen=True, tag=True):
    message: str
    param: str | None
    code: str | None


class BodyReader:
    """Owns the process that reads large bodies, which starts when the first comes."""

    def __init__(self) -> None:
        self._workers = Workers("weft.server.http.bodies")
        self._answers = msgspec.msgpack.Decoder(_Read | _Refused)

    async def read(self, kind: type[T], body: bytearray, asker: str) -> tuple[T, list[str]]:
        """As `schema.read`."""
        if len(body) <= _SMALL_BYTES:
            return schema.read(kind, bytes(body))
        name, cost = kind.__name__.encode() + b"\n", _SECONDS_PER_BYTE * len(body)
        try:
            content = await self._workers.ask(name, body, asker=asker, cost=cost, seconds=_SECONDS)
        except TimeoutError:
            message = f"the body took more than {_SECONDS:g} s to read; send it again later"
            raise ApiError(503, message, code="server_busy") from None
        try:
            answer = self._answers.decode(content)
            if isinstance(answer, _Read):
                return msgspec.msgpack.decode(answer.fields, type=kind), answer.unknown
        except RecursionError:  # the process, which does little else, had room for it
            message = "the body is nested too deeply; send it flatter"
            raise ApiError(400, message, code="invalid_json") from None
        raise ApiError(400, answer.message, param=answer.param, code=answer.code)

    async def close(self) -> None:
        await self._workers.close()


def _answer(question: bytes) -> bytes:
    name, _, body = question.partition(b"\n")
    kind: type[msgspec.Struct] = getattr(schema, name.decode())
    try:
        asked, unknown = schema.read(kind, body)
        # Before each value but the first stands a comma, or it is the first of its list or object: mostly there is
        # nothing to count.
        most = body.count(b",") + 1 + _WEIGHT * sum(map(body.count, (b"[", b"{", b":")))
        if most > _MAX_VALUES and _has_too_many_values(asked):
            message = (
                f"the body has more than {_MAX_VALUES} values; allowed: {_MAX_VALUES}, where a list, an object and an "
                f"entry of an object count as {_WEIGHT}; send several requests"
            )
            raise ApiError(400, message, code="body_too_large")
        content = packed(asked, asked)
    except ApiError as error:
        return msgspec.msgpack.encode(_Refused(error.message, error.param, error.code))
    except InvalidRequestError as error:
        return msgspec.msgpack.encode(_Refused(str(error), error.field or None, error.code))
    return msgspec.msgpack.encode(_Read(msgspec.Raw(content), unknown))


def _has_too_many_values(asked: msgspec.Struct) -> bool:
    """Without recursion: a body may be nested as deeply as the parser lets it."""
    count = 0
    unseen: list[Any] = [[getattr(asked, name) for name in asked.__struct_fields__]]
    while unseen and count <= _MAX_VALUES:
        values = unseen.pop()
        count += _WEIGHT + len(values) * (_WEIGHT if isinstance(values, dict) else 1)
        inner = values.values() if isinstance(values, dict) else values
        unseen.extend(value for value in inner if isinstance(value, list | dict))
    return count > _MAX_VALUES


if __name__ == "__main__":
    ignore_signals()
    gc.disable()  # nothing refers back in what is read here, and looking for it takes longer than reading
    answer_all(_answer)
