"""Downloads one file from an HTTP or file URL. An interrupted download is resumed."""

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
from weft.loading.checksum import Advance, ExpectedFile, has_right_checksum, size_of

_PIECE_BYTES = 1 << 20
_TIMEOUT_SECONDS = 30.0
_WAITS_SECONDS = (0.5, 2.0, 5.0)
"""The delays between attempts. They start again from the first as soon as an attempt received any byte."""


class TransferError(ModelFileError):
    """The transfer failed. The received bytes are kept, and the next attempt resumes after them."""


class ChecksumError(ModelFileError):
    """The server's file does not have the expected size or checksum."""


@dataclass(frozen=True)
class Location:
    """A URL and its headers. The headers may hold a token, so they are never sent to the target of a redirect."""

    url: str
    headers: Mapping[str, str] = field(default_factory=dict)


def download(locate: Callable[[], Location], partial: Path, expected: ExpectedFile, advance: Advance) -> None:
    """Completes the file `partial` and verifies its checksum. Calls `locate` before every attempt: URLs may expire."""
    is_resumed = size_of(partial) > 0
    _transfer(locate, partial, expected, advance)
    if has_right_checksum(partial, expected):
        return
    partial.unlink()
    if is_resumed:
        # The bytes received before may be from an older version of the file, or from another server. So everything is
        # downloaded again.
        _transfer(locate, partial, expected, advance)
        if has_right_checksum(partial, expected):
            return
        partial.unlink()
    raise ChecksumError(
        f"{expected.name}: the {expected.size} bytes received do not have the checksum {expected.digest} and were "
        "deleted. Try again; if it happens again, the server has a different file under this name"
    )


def _transfer(
    locate: Callable[[], Location], partial: Path, expected: ExpectedFile, advance: Advance
) -> None:
    """Appends to `partial` until it has the expected size."""
    if size_of(partial) > expected.size:
        partial.unlink()
    waits = iter(_WAITS_SECONDS)
    while (begun := size_of(partial)) < expected.size or not partial.exists():
        advance(begun)
        try:
            _append(locate(), partial, expected, advance)
        except (urllib.error.URLError, http.client.HTTPException, OSError) as error:
            if _is_disk_error(error):
                raise
            if isinstance(error, urllib.error.HTTPError) and error.code == 416:
                raise _wrong_file(expected, f"at most {begun}") from error
            if size_of(partial) > begun:
                waits = iter(_WAITS_SECONDS)
            wait = next(waits, None)
            if wait is None or not _is_transient(error):
                raise _transfer_failed(expected, size_of(partial), error) from error
            time.sleep(wait)
    advance(expected.size)


def _append(location: Location, partial: Path, expected: ExpectedFile, advance: Advance) -> None:
    """Requests the missing rest of the file once, and appends it to `partial`."""
    begun = size_of(partial)
    with _open(location, begun, expected) as (response, start), partial.open("ab") as file:
        file.truncate(start)
        done = start
        # One byte more than expected proves that this is a different file.
        while piece := response.read(min(_PIECE_BYTES, expected.size + 1 - done)):
            file.write(piece)
            done += len(piece)
            advance(min(done, expected.size))
    if done > expected.size:
        partial.unlink()
        raise _wrong_file(expected, f"more than {expected.size}")
    if done < expected.size:
        raise ConnectionError(f"the connection ended after {done} of {expected.size} bytes")


@contextmanager
def _open(location: Location, begun: int, expected: ExpectedFile) -> Iterator[tuple[IO[bytes], int]]:
    """Opens the rest of the file. Yields the response and its offset: `begun`, or 0 if the server supports no ranges."""
    request = urllib.request.Request(location.url)
    for name, value in location.headers.items():
        request.add_unredirected_header(name, value)
    request.add_header("Accept-Encoding", "identity")
    if begun:
        request.add_header("Range", f"bytes={begun}-")
    with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS) as response:
        start, announced = 0, response.headers.get("Content-Length")
        if response.status == 206:
            content_range = response.headers.get("Content-Range", "")
            found = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", content_range)
            if not found or int(found[1]) != begun:
                raise ConnectionError(f"requested the bytes from {begun}, the server sent {content_range!r}")
            start, announced = begun, found[2] if found[2] != "*" else None
        if announced is not None and int(announced) != expected.size:
            raise _wrong_file(expected, announced)
        yield response, start


def _wrong_file(expected: ExpectedFile, size: str) -> ChecksumError:
    return ChecksumError(
        f"{expected.name}: the server's file has {size} bytes, expected {expected.size}: it is a different file"
    )


def _is_disk_error(error: Exception) -> bool:
    """Whether the local disk failed, and not the transfer. Then another attempt does not help."""
    if isinstance(error, urllib.error.URLError) or not isinstance(error, OSError):
        return False
    return error.filename is not None or error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO)


def _is_transient(error: Exception) -> bool:
    """Whether a retry may help. After a refusal (most 4xx) or a failed certificate check, a retry does not help."""
    if isinstance(error, urllib.error.HTTPError):
        return error.code in (408, 425, 429) or error.code >= 500
    return not isinstance(getattr(error, "reason", None), ssl.SSLCertVerificationError)


def _transfer_failed(expected: ExpectedFile, done: int, error: Exception) -> TransferError:
    reason = getattr(error, "reason", None) or error
    if isinstance(error, urllib.error.HTTPError):
        reason = f"the server answered {error.code} {error.reason}"
    return TransferError(
        f"{expected.name}: {reason or type(error).__name__}; {done} of {expected.size} bytes were received and kept. "
        "Check the network and try again: the download resumes there"
    )
