"""Files of packed weights: what a model's tensors became on this machine, kept so that the next start only maps it.

    magic, length of the header (8 bytes), header, zeros up to a page, pieces, each at a multiple of 64 bytes

The header says where the pieces come from and what they are. A file whose header is not exactly the one that is wanted
is made again, so there is nothing in it to trust but sizes.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np

from weft.loading.cache import models_directory, only_one_pull, partial_path

_MAGIC = b"weft packed weights\n"
_PAGE = 4096
_ALIGNMENT = 64

Sizes = Mapping[str, int]
Fill = Callable[[str, np.ndarray], None]


def packed_path(model: Path, variant: str) -> Path:
    """Where the packed weights of a model are kept: one file for each place of a model and each variant of its weights."""
    place = hashlib.sha256(os.fsencode(model.resolve())).hexdigest()[:12]
    return models_directory().parent / "packed" / f"{model.stem}-{place}-{variant}.packed"


def identity_of(files: Iterable[Path], variant: str) -> str:
    """Says which files were packed, and how: another size or time of one is another identity."""
    stated = sorted((str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in files)
    return json.dumps([variant, stated])


def open_packed(
    path: Path, identity: str, sizes: Sizes, fill: Fill, threads: int
) -> dict[str, np.ndarray] | None:
    """The pieces by name, mapped from the file at `path`, which is made first where it is missing or of another
    identity. None where it cannot be kept: no room, or no right to write."""
    header = _header(identity, sizes)
    places, total = _places(sizes, len(header))
    if (pieces := _map(path, header, sizes, places, total)) is not None:
        return pieces
    try:
        with only_one_pull(path.with_suffix(".lock"), lambda progress: None):
            # Another process may have made it while this one waited.
            if (pieces := _map(path, header, sizes, places, total)) is None:
                if shutil.disk_usage(path.parent).free < total + total // 8:
                    return None
                _make(path, header, sizes, places, total, fill, threads)
                pieces = _map(path, header, sizes, places, total)
    except OSError:
        return None
    return pieces


def _header(identity: str, sizes: Sizes) -> bytes:
    described = json.dumps({"from": identity, "pieces": list(sizes.items())}).encode()
    return _MAGIC + len(described).to_bytes(8, "little") + described


def _places(sizes: Sizes, header_bytes: int) -> tuple[dict[str, int], int]:
    places, end = {}, -(-header_bytes // _PAGE) * _PAGE
    for name, size in sizes.items():
        places[name] = end
        end += -(-size // _ALIGNMENT) * _ALIGNMENT
    return places, end


def _map(
    path: Path, header: bytes, sizes: Sizes, places: Mapping[str, int], total: int
) -> dict[str, np.ndarray] | None:
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size != total or file.read(len(header)) != header:
                return None
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError:
        return None
    with suppress(AttributeError, OSError):  # not on every system, and not on every kernel for files
        mapped.madvise(mmap.MADV_HUGEPAGE)
    mapped.madvise(mmap.MADV_WILLNEED)
    return {name: np.frombuffer(mapped, np.uint8, size, places[name]) for name, size in sizes.items()}


def _make(
    path: Path, header: bytes, sizes: Sizes, places: Mapping[str, int], total: int, fill: Fill, threads: int
) -> None:
    """Packed straight into the file: the weights are never in memory as a whole."""
    partial = partial_path(path)
    with partial.open("w+b") as file:
        os.posix_fallocate(file.fileno(), 0, total)  # no room is an error here, not a signal later
        with mmap.mmap(file.fileno(), total) as mapped:
            mapped[: len(header)] = header

            def fill_one(name: str) -> None:
                fill(name, np.frombuffer(mapped, np.uint8, sizes[name], places[name]))

            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(fill_one, sizes))
        os.fsync(file.fileno())
        # Written a page at a time, it lies in small pages: whoever maps it now reads it again, in large ones.
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    partial.replace(path)
