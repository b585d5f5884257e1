"""Reads files of JSON lines, one line at a time, with a limit for its length."""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO

from weft.errors import InvalidRequestError


def read_lines(file: IO[bytes], max_bytes: int) -> Iterator[bytes | InvalidRequestError]:
    """Yields the lines of a file. A line that is too long is skipped and gives an error. One line at a time is in
    memory, so the limit bounds the memory."""
    while line := file.readline(max_bytes + 1):
        if len(line) <= max_bytes:
            yield line
            continue
        while line and not line.endswith(b"\n"):
            line = file.readline(max_bytes)
        yield InvalidRequestError(f"the line is longer than {max_bytes} bytes; split it")
