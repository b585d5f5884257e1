"""The lines of batch files: what a line of the input must be, and how a line of the output is written."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import msgspec

from weft.errors import InvalidRequestError
from weft.json_lines import read_lines
from weft.server.internal import InternalReply
from weft.server.state.batches import LineError, Result

MAX_LINES = 1_000_000
"""Limit for the lines of one batch."""
MAX_CUSTOM_ID = 512
_PIECE_LINES = 256
_PIECE_BYTES = 256 << 10
"""The input is read in pieces, which take about a millisecond to check. A piece ends after this many lines, or with the
line that reaches this many bytes."""
_FORBIDDEN = {
    "stream": "the results of a batch are in a file; leave stream out",
    "background": "a batch runs in the background already; leave background out",
}


@dataclass(frozen=True)
class Line:
    """A line of the input that can run."""

    index: int
    custom_id: str
    body: bytes


@dataclass(frozen=True)
class WrongLine:
    """A line of the input that cannot run."""

    index: int
    custom_id: str | None
    error: LineError


class _Request(msgspec.Struct, frozen=True):
    custom_id: str
    url: str
    body: msgspec.Raw
    method: str = "POST"


class _PartialRequest(msgspec.Struct, frozen=True):
    """Only the id of a line. For lines whose other fields are wrong."""

    custom_id: str | None = None


class _Body(msgspec.Struct, frozen=True):
    """Fields of a body that no line may set. All others are checked by the format of the route."""

    stream: Any = None
    background: Any = None


class _Response(msgspec.Struct, frozen=True):
    status_code: int
    request_id: str
    body: msgspec.Raw


class _OutputLine(msgspec.Struct, frozen=True):
    id: str
    custom_id: str | None
    response: _Response | None
    error: dict[str, str] | None


_requests = msgspec.json.Decoder(_Request)
_partial_requests = msgspec.json.Decoder(_PartialRequest)
_bodies = msgspec.json.Decoder(_Body)
_encode = msgspec.json.Encoder().encode


def read_pieces(path: Path, endpoint: str, max_line_bytes: int) -> Iterator[list[Line | WrongLine]]:
    """The lines of a file that are not empty, in small pieces. Reading a piece blocks: call `next` in a thread."""
    with path.open("rb") as file:
        piece: list[Line | WrongLine] = []
        num_bytes = 0
        for index, raw in zip(count(), read_lines(file, max_line_bytes)):
            if isinstance(raw, bytes) and raw.isspace():
                continue
            piece.append(_check(index, raw, endpoint))
            num_bytes += len(raw) if isinstance(raw, bytes) else 0
            if len(piece) == _PIECE_LINES or num_bytes >= _PIECE_BYTES:
                yield piece
                piece, num_bytes = [], 0
        yield piece


def _check(index: int, raw: bytes | InvalidRequestError, endpoint: str) -> Line | WrongLine:
    """Checks one line of an input file. Returns the line, or what is wrong with it."""
    if not isinstance(raw, bytes):
        return _wrong(index, None, "line_too_long", str(raw))
    try:
        request = _requests.decode(raw)
        forbidden = _bodies.decode(request.body)
    except msgspec.ValidationError as error:
        return _wrong(index, _custom_id(raw), "invalid_line", f"{error}; {_FORM}")
    except RecursionError:
        return _wrong(index, None, "invalid_json_line", "the line is nested too deeply; use fewer levels")
    except ValueError as error:  # also invalid UTF-8
        return _wrong(index, None, "invalid_json_line", f"the line is not JSON: {error}")
    custom_id = request.custom_id
    if not 1 <= len(custom_id) <= MAX_CUSTOM_ID:
        message = f"custom_id has {len(custom_id)} characters; allowed: 1 to {MAX_CUSTOM_ID}"
        return _wrong(index, custom_id[:MAX_CUSTOM_ID], "invalid_custom_id", message, "custom_id")
    if request.method != "POST":
        message = f"method is {request.method!r:.80}; allowed: POST"
        return _wrong(index, custom_id, "invalid_method", message, "method")
    if request.url != endpoint:
        message = f"url is {request.url!r:.80}; allowed: {endpoint}, the endpoint of the batch"
        return _wrong(index, custom_id, "mismatched_url", message, "url")
    # `false` and `null` are allowed: they ask for nothing.
    for name, why in _FORBIDDEN.items():
        if getattr(forbidden, name) not in (None, False):
            return _wrong(index, custom_id, "unsupported", why, f"body.{name}")
    return Line(index, custom_id, bytes(request.body))


_FORM = "a line is an object with custom_id (text), method (POST), url (text) and body (an object)"


def _custom_id(raw: bytes) -> str | None:
    """The id of a line whose other fields are wrong. None: its id is wrong too."""
    try:
        custom_id = _partial_requests.decode(raw).custom_id
    except msgspec.ValidationError:
        return None
    return None if custom_id is None else custom_id[:MAX_CUSTOM_ID]


def _wrong(index: int, custom_id: str | None, code: str, message: str, param: str | None = None) -> WrongLine:
    return WrongLine(index, custom_id, LineError(code, message, index + 1, param))


class CustomIds:
    """The ids that were seen in a file, as 64-bit hashes in an open hash table: 16 to 32 bytes for each id. Python seeds
    its hash at random, so a client cannot choose ids with equal hashes. Among a million ids, the probability that two
    have the same hash is 3e-8."""

    def __init__(self, max_ids: int) -> None:
        size = 1 << (2 * max_ids).bit_length()
        self._mask = size - 1
        self._slots = array("q", bytes(8)) * size

    def checked(self, line: Line | WrongLine) -> Line | WrongLine:
        """The line, or an error if an earlier line has the same id."""
        if isinstance(line, WrongLine) or self._add(line.custom_id):
            return line
        message = f"an earlier line has the custom_id {line.custom_id!r:.80}; give every line its own"
        return _wrong(line.index, line.custom_id, "duplicate_custom_id", message, "custom_id")

    def _add(self, custom_id: str) -> bool:
        value = hash(custom_id) or 1
        slot = value & self._mask
        while known := self._slots[slot]:
            if known == value:
                return False
            slot = (slot + 1) & self._mask
        self._slots[slot] = value
        return True


def reply_result(batch_id: str, line: Line, reply: InternalReply) -> Result:
    """The result of a line that was answered."""
    body = reply.body
    if not reply.headers.get(b"content-type", b"").startswith(b"application/json"):
        message = f"the endpoint answered with status {reply.status} and no JSON"
        return error_result(batch_id, line.index, line.custom_id, "no_json", message)
    if b"\n" in body:
        body = msgspec.json.format(body, indent=-1)
    request_id = reply.headers.get(b"x-request-id", b"").decode("latin-1")
    response = _Response(reply.status, request_id, msgspec.Raw(body))
    content = _encode(_OutputLine(_result_id(batch_id, line.index), line.custom_id, response, None))
    return Result(line.index, reply.status >= 400, content)


def error_result(batch_id: str, index: int, custom_id: str | None, code: str, message: str) -> Result:
    """The result of a line that has no answer."""
    error = {"code": code, "message": message}
    return Result(index, True, _encode(_OutputLine(_result_id(batch_id, index), custom_id, None, error)))


def _result_id(batch_id: str, index: int) -> str:
    return f"batch_req_{batch_id.removeprefix('batch_')}_{index}"
