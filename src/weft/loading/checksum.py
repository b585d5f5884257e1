"""What a fetched file has to be, and whether a file is that, by every byte of it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

_PIECE_BYTES = 1 << 20

Advance = Callable[[int], object]
"""Gets how many bytes of the file are here."""


@dataclass(frozen=True)
class Expected:
    """What the whole file has to be. `git` is the checksum git knows a small file by: SHA-1 with its size in front."""

    name: str
    size: int
    kind: Literal["sha256", "git"]
    digest: str

    def new_digest(self) -> Any:
        if self.kind == "sha256":
            return hashlib.sha256()
        return hashlib.sha1(b"blob %d\0" % self.size, usedforsecurity=False)


def matches(path: Path, expected: Expected, advance: Advance = lambda _: None) -> bool:
    """Whether the file at `path` is the expected one, by every byte of it."""
    return size_of(path) == expected.size and is_right(path, expected, advance)


def is_right(path: Path, expected: Expected, advance: Advance = lambda _: None) -> bool:
    """Whether a file of the right size has the right checksum."""
    digest, done = expected.new_digest(), 0
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            digest.update(piece)
            done += len(piece)
            advance(done)
    return bool(digest.hexdigest() == expected.digest)


def size_of(path: Path) -> int:
    """0 for a file that is not there."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
