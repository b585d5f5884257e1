"""Opens model files: memory-mapped, as text, or as JSON. Errors name the file and what is wrong.

Model files are untrusted. One may be an endless pipe, a broken link, or JSON nested deep enough to overflow the stack.
"""

from __future__ import annotations

import json
import mmap
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from weft.errors import ModelFileError

# The largest published tokenizer.json has 33 MB. Parsed JSON may take twenty times the memory of its text.
_MAX_TEXT_BYTES = 64 << 20
_MAX_JSON_DEPTH = 64

# A page fault also maps neighbouring pages: 16 pages, or 2 MiB if the page cache holds the file in huge pages. Some of
# them lie before the fault and were released already. So `release_pages` also releases this much before its range.
# Without it, half of a file stayed resident.
_NEIGHBOUR_BYTES = 2 << 20

PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
"""Files of these names may be pickles, which can run code when read. They are rejected by name and never opened."""


def field_error(path: Path, field: str, problem: str) -> ModelFileError:
    """The error for one field of a file."""
    # The name is untrusted and the message goes to terminals and logs: escape and shorten it.
    shown = field if field.isprintable() and len(field) <= 120 else repr(field[:120])
    return ModelFileError(f"{path}: {shown}: {problem}")


@contextmanager
def _open_regular(path: Path) -> Iterator[tuple[BinaryIO, int]]:
    """Opens a regular file. Yields it and its size in bytes."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            found = "a folder" if path.is_dir() else "not a regular file"
            raise ModelFileError(f"{path}: cannot be opened: it is {found}")
        with path.open("rb") as file:
            yield file, os.fstat(file.fileno()).st_size
    except FileNotFoundError as error:
        if path.is_symlink():
            problem = f"it is a link to {os.readlink(path)}, which does not exist; download the model again"
            raise ModelFileError(f"{path}: cannot be opened: {problem}") from error
        raise ModelFileError(f"{path}: cannot be opened: it does not exist") from error
    except (OSError, ValueError) as error:  # ValueError: a path with a zero byte in it
        reason = getattr(error, "strerror", None) or error
        raise ModelFileError(f"{path}: cannot be opened: {reason}") from error


# --- mapped -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MappedFile:
    """A read-only memory map of a file. It lives as long as any array that refers to it.

    If another process truncates the file, reading the lost part kills this process (SIGBUS), which Python cannot
    catch. `weft pull` therefore only replaces whole files.
    """

    path: Path
    data: mmap.mmap

    @property
    def size(self) -> int:
        return len(self.data)

    def release_pages(self, start: int, stop: int) -> None:
        """Releases the pages of these bytes from this process's memory.

        A later read is still correct: it maps them again, from the page cache or the disk.
        """
        if hasattr(mmap, "MADV_DONTNEED"):
            first = max(0, start - _NEIGHBOUR_BYTES)
            first -= first % mmap.PAGESIZE
            self.data.madvise(mmap.MADV_DONTNEED, first, stop - first)


def map_file(path: Path, kind: str, header_bytes: int) -> MappedFile:
    """Maps a file of the format `kind`, which begins with a header of at least `header_bytes`."""
    with _open_regular(path) as (file, size):
        # A message for files that are too short. mmap would raise an error of its own for an empty file.
        if size < header_bytes:
            raise ModelFileError(
                f"{path}: header: the file has {size} bytes, a {kind} header alone needs {header_bytes}; "
                "download the file again"
            )
        return MappedFile(path, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


# --- text and JSON ----------------------------------------------------------------------------------------------------


def read_text(path: Path) -> str:
    """The content of a UTF-8 text file."""
    try:
        return _read(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ModelFileError(f"{path}: byte {error.start} is not UTF-8") from error


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file."""
    return parse_json(path, _read(path), "JSON")


def _read(path: Path) -> bytes:
    with _open_regular(path) as (file, size):
        if size > _MAX_TEXT_BYTES:
            raise ModelFileError(f"{path}: the file has {size} bytes, the limit is {_MAX_TEXT_BYTES}")
        return file.read(size)


def parse_json(path: Path, text: bytes, field: str) -> dict[str, Any]:
    """Parses the JSON object in `text`, which errors call `field`. Rejects duplicate names and too deep nesting."""
    too_deep = f"is nested deeper than {_MAX_JSON_DEPTH} levels"
    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=_object)
    except RecursionError as error:
        raise field_error(path, field, too_deep) from error
    except ValueError as error:  # not UTF-8, not JSON, a duplicate name, a number of thousands of digits
        raise field_error(path, field, f"cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise field_error(path, field, f"is {_kind(value)}, expected an object")
    if _depth_exceeds(value, _MAX_JSON_DEPTH):
        raise field_error(path, field, too_deep)
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Makes an object of the pairs in JSON. Rejects duplicate names."""
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        again = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"the name {again[:120]!r} appears twice in one object")
    return result


def _depth_exceeds(value: Any, limit: int) -> bool:
    # The check goes level by level, without recursion: a malicious value could overflow the stack.
    level = [value]
    for _ in range(limit):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return False
    return True


def _kind(value: Any) -> str:
    kinds = {list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return kinds.get(type(value), "a number")
