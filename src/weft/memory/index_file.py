"""The file of a base: the graph of a vector index. It is written whole, named by its hash, and mapped into memory. Only
`usearch` knows its format."""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from usearch.index import Index

PARTIAL = ".new-"
_CONNECTIVITY = 32
_EXPANSION_ADD = 128
_EXPANSION_SEARCH = 320
"""Candidates that a search follows. 192 gave a recall of 0.977 for a million vectors (docs/lab/2026-11-19-memory.md)."""
_PIECE_BYTES = 4 << 20

Keys = NDArray[np.uint64]
Vectors = NDArray[np.float32]


class DamagedIndexError(Exception):
    """The content of an index file does not have the hash of its name."""


class NoIndexError(Exception):
    """The package usearch is not installed."""


def new_graph(dimensions: int) -> Any:
    """An empty graph. Raises NoIndexError if usearch is not installed."""
    return _index_type()(
        ndim=dimensions,
        metric="ip",
        dtype="f16",
        connectivity=_CONNECTIVITY,
        expansion_add=_EXPANSION_ADD,
        expansion_search=_EXPANSION_SEARCH,
    )


def add_vectors(graph: Index, keys: Keys, vectors: Vectors, threads: int) -> None:
    graph.add(keys, vectors, threads=threads)


def write_graph(graph: Index, folder: Path, store_id: str) -> str:
    """Writes the file and returns its name. If it is interrupted, only a file whose name begins with `PARTIAL` remains."""
    folder.mkdir(mode=0o700, exist_ok=True)
    partial = folder / f"{PARTIAL}{store_id}"
    with suppress(FileNotFoundError):
        partial.unlink()
    os.close(os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    graph.save(str(partial))
    with partial.open("rb") as file:
        os.fsync(file.fileno())
    name = f"{store_id}-{_hash(partial)}"
    os.replace(partial, folder / name)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return name


def open_graph(folder: Path, name: str, *, is_mapped: bool = True) -> Any:
    """Maps a file. Without `is_mapped`, loads a copy that can be changed. Raises FileNotFoundError, NoIndexError, or
    DamagedIndexError."""
    kind = _index_type()
    path = folder / name
    if _hash(path) != name.rpartition("-")[2]:
        raise DamagedIndexError
    graph = kind.restore(str(path), view=is_mapped)
    graph.expansion_search = _EXPANSION_SEARCH
    graph.expansion_add = _EXPANSION_ADD
    return graph


def graph_keys(graph: Index) -> NDArray[np.int64]:
    """All keys, in order."""
    keys: NDArray[np.uint64] = graph.keys[:]  # type: ignore[assignment]
    return np.sort(keys.astype(np.int64))


def _index_type() -> Any:
    try:
        from usearch.index import Index
    except ImportError:
        raise NoIndexError from None
    return Index


def _hash(path: Path) -> str:
    found = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            found.update(piece)
    return found.hexdigest()
