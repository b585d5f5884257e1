"""Fetches one file over HTTP, or from a file URL, such that a transfer that broke goes on where it stopped."""

from __future__ import annotations

import errno
import http.client
import re
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from weft.errors import ModelFileError
from weft.loading.checksum import Advance, Expected, is_right, size_of

_PIECE_BYTES = 1 << 20
_TIMEOUT_SECONDS = 30.0
_WAITS_SECONDS = (0.5, 2.0, 5.0)
"""Before each further attempt when not a byte came since the last one."""


class TransferError(ModelFileError):
    """The bytes could not be fetched; those that came are kept, and asking again goes on behind them."""


class ChecksumError(ModelFileError):
    """What was fetched is not the file that was asked for."""


@dataclass(frozen=True)
class Location:
    """Where the bytes are. Headers go to this address alone, never along with a redirect: they may carry a token."""

    url: str
    headers: Mapping[str, str] = field(default_factory=dict)


def download(locate: Callable[[], Location], partial: Path, expected: Expected, advance: Advance) -> None:
    """Make `partial` the whole and checked file. `locate` is asked before every attempt: addresses may expire."""
    was_begun = size_of(partial) > 0
    _transfer(locate, partial, expected, advance)
    if is_right(partial, expected):
        return
    partial.unlink()
    if was_begun:
        # The beginning came from another day, perhaps from another server: all of it once more.
        _transfer(locate, partial, expected, advance)
        if is_right(partial, expected):
            return
        partial.unlink()
    raise ChecksumError(
        f"{expected.name}: the {expected.size} bytes that came do not have the checksum {expected.digest}; "
        "they are thrown away. Try again; if it happens again, the server gives out another file under this name"
    )


def _transfer(locate: Callable[[], Location], partial: Path, expected: Expected, advance: Advance) -> None:
    """Append to `partial` until it has its size."""
    if size_of(partial) > expected.size:
        partial.unlink()
    waits = iter(_WAITS_SECONDS)
    while (begun := size_of(partial)) < expected.size or not partial.exists():
        advance(begun)
        try:
            _append(locate(), partial, expected, advance)
        except (urllib.error.URLError, http.client.HTTPException, OSError) as error:
            if _is_of_the_disk(error):
                raise
            if isinstance(error, urllib.error.HTTPError) and error.code == 416:
                raise _another_file(expected, f"at most {begun}") from error
            if size_of(partial) > begun:
                waits = iter(_WAITS_SECONDS)
            wait = next(waits, None)
            if wait is None or not _may_pass(error):
                raise _transfer_failed(expected, size_of(partial), error) from error
            time.sleep(wait)
    advance(expected.size)


def _append(location: Location, partial: Path, expected: Expected, advance: Advance) -> None:
    begun = size_of(partial)
    with _open(location, begun, expected) as (response, start), partial.open("ab") as file:
        file.truncate(start)
        done = start
        # One byte more than expected is enough to know that this is another file.
        while piece := response.read(min(_PIECE_BYTES, expected.size + 1 - done)):
            file.write(piece)
            done += len(piece)
            advance(min(done, expected.size))
    if done > expected.size:
        partial.unlink()
        raise _another_file(expected, f"more than {expected.size}")
    if done < expected.size:
        raise ConnectionError(f"the connection ended after {done} of {expected.size} bytes")


@contextmanager
def _open(location: Location, begun: int, expected: Expected) -> Iterator[tuple[IO[bytes], int]]:
    """The rest of the file, and where it starts: at `begun`, or at 0 with a server that knows no ranges."""
    request = urllib.request.Request(location.url)
    for name, value in location.headers.items():
        request.add_unredirected_header(name, value)
    request.add_header("Accept-Encoding", "identity")
    if begun:
        request.add_header("Range", f"bytes={begun}-")
    with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS) as response:
        start, announced = 0, response.headers.get("Content-Length")
        if response.status == 206:
            said = response.headers.get("Content-Range", "")
            found = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", said)
            if not found or int(found[1]) != begun:
                raise ConnectionError(f"bytes from {begun} were asked for, and the server sent {said!r}")
            start, announced = begun, found[2] if found[2] != "*" else None
        if announced is not None and int(announced) != expected.size:
            raise _another_file(expected, announced)
        yield response, start


def _another_file(expected: Expected, size: str) -> ChecksumError:
    return ChecksumError(
        f"{expected.name}: the server has {size} bytes under this name instead of {expected.size}: another file"
    )


def _is_of_the_disk(error: Exception) -> bool:
    if isinstance(error, urllib.error.URLError) or not isinstance(error, OSError):
        return False
    return error.filename is not None or error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO)


def _may_pass(error: Exception) -> bool:
    """Whether asking again may help: not where the server understood and refused, or cannot prove who it is."""
    if isinstance(error, urllib.error.HTTPError):
        return error.code in (408, 425, 429) or error.code >= 500
    return not isinstance(getattr(error, "reason", None), ssl.SSLCertVerificationError)


def _transfer_failed(expected: Expected, done: int, error: Exception) -> TransferError:
    reason = getattr(error, "reason", None) or error
    if isinstance(error, urllib.error.HTTPError):
        reason = f"the server answered {error.code} {error.reason}"
    return TransferError(
        f"{expected.name}: {reason or type(error).__name__}; {done} of {expected.size} bytes are here and kept. "
        "Check the network and try again: it goes on from there"
    )
