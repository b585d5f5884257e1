"""The expected size and checksum of a downloaded file, and the check of both."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

_PIECE_BYTES = 1 << 20

Advance = Callable[[int], object]
"""Progress callback: called with the number of bytes of the file processed so far."""


@dataclass(frozen=True)
class ExpectedFile:
    """Name, size and checksum of a complete file. Kind `git` is a git blob id: SHA-1 over a header and the content."""

    name: str
    size: int
    kind: Literal["sha256", "git"]
    digest: str

    def new_digest(self) -> Any:
        if self.kind == "sha256":
            return hashlib.sha256()
        return hashlib.sha1(b"blob %d\0" % self.size, usedforsecurity=False)


def matches(path: Path, expected: ExpectedFile, advance: Advance = lambda _: None) -> bool:
    """Whether the file at `path` has the expected size and checksum. Reads the whole file."""
    return size_of(path) == expected.size and has_right_checksum(path, expected, advance)


def has_right_checksum(path: Path, expected: ExpectedFile, advance: Advance = lambda _: None) -> bool:
    """Whether the file has the expected checksum. The size is not checked."""
    digest, done = expected.new_digest(), 0
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            digest.update(piece)
            done += len(piece)
            advance(done)
    return bool(digest.hexdigest() == expected.digest)


def size_of(path: Path) -> int:
    """The size in bytes; 0 for a missing file."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
