"""Parses request bodies without blocking the event loop.

A parser holds the interpreter lock. Parsing 16 MB of small numbers takes 0.4 s, in which no stream advances, and needs
25 times their size in memory. Therefore a worker process (this module as `__main__`) parses large bodies, one at a
time. It sends back the parsed request or the error.
"""

from __future__ import annotations

import gc
from importlib import import_module
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

from weft.errors import InvalidRequestError
from weft.server.api import schema
from weft.server.errors import ApiError, refusal
from weft.server.text_work.worker import Workers, encode_message, ignore_signals, serve_jobs

_SMALL_BYTES = 256 << 10
"""A body of up to this size is parsed in at most a few milliseconds."""
_MAX_VALUES = 1 << 18
"""Limit for the JSON values in a large body. The server must decode the result of the worker process. With more values,
that would block the event loop as long as parsing the body itself."""
_CONTAINER_WEIGHT = 4
"""A list, an object, and each entry of an object count as this many values, because decoding them takes that much
longer."""
_SECONDS_PER_BYTE = 2.5e-8
_SECONDS = 60.0

T = TypeVar("T", bound=msgspec.Struct)


async def read_body(request: Request) -> bytearray:
    """Reads the whole body. Unlike `request.body()`, it makes no second copy and the request keeps no reference."""
    body = bytearray()
    async for part in request.stream():
        body += part
    return body


class _ParsedBody(msgspec.Struct, frozen=True, tag=True):
    fields: msgspec.Raw
    unknown: list[str]


class _BodyError(msgspec.Struct, frozen=True, tag=True):
    message: str
    param: str | None
    code: str | None


class BodyReader:
    """Owns the worker process for large bodies. The process starts with the first large body."""

    def __init__(self) -> None:
        self._workers = Workers("weft.server.http.bodies")
        self._decoder = msgspec.msgpack.Decoder(_ParsedBody | _BodyError)

    async def read(self, kind: type[T], body: bytearray, client_id: str) -> tuple[T, list[str]]:
        """Does the same as `schema.read`."""
        if len(body) <= _SMALL_BYTES:
            return schema.read(kind, bytes(body))
        name, cost = f"{kind.__module__} {kind.__name__}\n".encode(), _SECONDS_PER_BYTE * len(body)
        try:
            content = await self._workers.run(name, body, client_id=client_id, cost=cost, seconds=_SECONDS)
        except TimeoutError:
            message = f"parsing the body took more than {_SECONDS:g} s; send it again later"
            raise ApiError(503, message, code="server_busy") from None
        try:
            result = self._decoder.decode(content)
            if isinstance(result, _ParsedBody):
                return msgspec.msgpack.decode(result.fields, type=kind), result.unknown
        except RecursionError:
            # The nesting was within the recursion limit of the worker process. Here the call stack is deeper already.
            message = "the body is nested too deeply; use fewer levels"
            raise ApiError(400, message, code="invalid_json") from None
        raise refusal(result.message, result.param, result.code)

    async def close(self) -> None:
        await self._workers.close()


def _parse(job: bytes) -> bytes:
    """Runs one job in the worker process: parses a body into the type that the job names."""
    name, _, body = job.partition(b"\n")
    module, _, kind_name = name.decode().partition(" ")
    # The server sends these names; a client cannot choose them.
    kind: type[msgspec.Struct] = getattr(import_module(module), kind_name)
    try:
        api_request, unknown = schema.read(kind, body)
        # A cheap upper bound of the count first: each value follows a comma, or is the first of its list or object.
        upper_bound = body.count(b",") + 1 + _CONTAINER_WEIGHT * sum(map(body.count, (b"[", b"{", b":")))
        if upper_bound > _MAX_VALUES and _has_too_many_values(api_request):
            message = (
                f"the body has more than {_MAX_VALUES} values; allowed: {_MAX_VALUES}. A list, an object, and an entry "
                f"of an object count as {_CONTAINER_WEIGHT} each. Split it into several requests"
            )
            raise ApiError(400, message, code="body_too_large")
        content = encode_message(api_request, api_request)
    except ApiError as error:
        return msgspec.msgpack.encode(_BodyError(error.message, error.param, error.code))
    except InvalidRequestError as error:
        return msgspec.msgpack.encode(_BodyError(str(error), error.field or None, error.code))
    return msgspec.msgpack.encode(_ParsedBody(msgspec.Raw(content), unknown))


def _has_too_many_values(api_request: msgspec.Struct) -> bool:
    """Counts the values of a large body. Does not recurse: the client chooses how deeply the body is nested."""
    count = 0
    unseen: list[Any] = [[getattr(api_request, name) for name in api_request.__struct_fields__]]
    while unseen and count <= _MAX_VALUES:
        values = unseen.pop()
        count += _CONTAINER_WEIGHT + len(values) * (_CONTAINER_WEIGHT if isinstance(values, dict) else 1)
        inner = values.values() if isinstance(values, dict) else values
        unseen.extend(value for value in inner if isinstance(value, list | dict))
    return count > _MAX_VALUES


if __name__ == "__main__":
    ignore_signals()
    gc.disable()  # parsed bodies have no reference cycles, and a collection takes longer than parsing
    serve_jobs(_parse)
