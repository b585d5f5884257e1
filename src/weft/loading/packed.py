"""Files of packed weights: what a model's tensors became on this machine, kept so that the next start only maps it.

    magic, checksum and length of the header (8 bytes each), header, zeros up to a page,
    pieces, each at a multiple of 64 bytes,
    checksums of all that, one for every 4 MiB

The header says where the pieces come from and what they are; a file with another header is made again. Every byte is
checked before one is used. A file that is damaged, or that others could have written to, is set aside and made again.
"""

from __future__ import annotations

import errno
import glob
import hashlib
import json
import logging
import mmap
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from weft.loading.cache import models_directory, only_one_pull, partial_path

_MAGIC = b"weft packed weights\n"
_PAGE = 4096
_ALIGNMENT = 64
_PART_BYTES = 4 << 20
_MAX_HEADER_BYTES = 64 << 20
_WRITABLE_BY_OTHERS = 0o022
_LOCK_SECONDS = 60.0
"""A wait for a process that packs the same folder. An engine that waits longer would look stuck (`stall_seconds`)."""

Sizes = Mapping[str, int]
Fill = Callable[[str, np.ndarray], None]
Checksum = Callable[[np.ndarray], int]
"""Of 64 bits. Called by several threads at once."""

_log = logging.getLogger(__name__)


class _Unusable(Exception):
    """Why a file, or a folder, that is there is not used."""


def packed_path(model: Path, variant: str) -> Path:
    """Where the packed weights of a model are kept: one file for each place of a model and each variant of its weights.
    A variant ends with the version of the packing."""
    return _folder() / f"{_name(model)}-{variant}.packed"


def packed_files(model: Path) -> list[Path]:
    """All that is kept of a model: its variants, of every version, damaged and unfinished ones too."""
    return sorted(_folder().glob(f"*{glob.escape(_name(model))}-*"))


def identity_of(files: Iterable[Path], variant: str) -> str:
    """Says which files were packed, and how: another size or time of one is another identity."""
    stated = sorted((str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in files)
    return json.dumps([variant, stated])


def open_packed(
    path: Path, identity: str, sizes: Sizes, fill: Fill, checksum: Checksum, threads: int
) -> dict[str, np.ndarray] | None:
    """The pieces by name, mapped from the file at `path`, which is made first where it is missing, damaged or of another
    identity. None where it cannot be kept: no space, no permission to write, a folder of another user, or another process
    that has been packing for too long. Then the caller packs the weights in memory."""
    layout = _Layout.of(identity, sizes, checksum)
    try:
        _make_private(path.parent)
        with suppress(_Unusable):  # decided under the lock: another process may be replacing it
            if (pieces := _map(path, layout, checksum, threads)) is not None:
                return pieces
        with only_one_pull(path.parent / ".lock", lambda progress: None, _LOCK_SECONDS):
            try:
                if (pieces := _map(path, layout, checksum, threads)) is not None:
                    return pieces
            except _Unusable as reason:
                _set_aside(path, reason)
            _sweep(path, checksum)
            if shutil.disk_usage(path.parent).free < layout.total + layout.total // 8:
                return None
            _make(path, layout, fill, checksum, threads)
            return _map(path, layout, checksum, threads)
    except _Unusable as reason:
        _log.warning("%s: packed weights are not kept there, and packed at every start", reason)
    except OSError:
        pass
    return None


@dataclass(frozen=True)
class _Layout:
    header: bytes
    places: Mapping[str, slice]
    end: int
    """Of the last piece; checksums follow."""

    @classmethod
    def of(cls, identity: str, sizes: Sizes, checksum: Checksum) -> _Layout:
        described = json.dumps({"from": identity, "pieces": list(sizes.items())}).encode()
        header = _MAGIC + _eight(checksum(_array(described))) + _eight(len(described)) + described
        places, end = {}, -(-len(header) // _PAGE) * _PAGE
        for name, size in sizes.items():
            places[name] = slice(end, end + size)
            end += -(-size // _ALIGNMENT) * _ALIGNMENT
        return cls(header, places, end)

    @property
    def total(self) -> int:
        return self.end + 8 * len(self.parts)

    @property
    def parts(self) -> list[slice]:
        """What has a checksum each."""
        return [slice(start, min(start + _PART_BYTES, self.end)) for start in range(0, self.end, _PART_BYTES)]

    def checksums(self, content: np.ndarray, checksum: Checksum, threads: int) -> bytes:
        with ThreadPoolExecutor(threads) as pool:
            return b"".join(map(_eight, pool.map(lambda part: checksum(content[part]), self.parts)))


def _map(path: Path, layout: _Layout, checksum: Checksum, threads: int) -> dict[str, np.ndarray] | None:
    """None: there is no file, or one of other weights."""
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            _check_owner(status)
            if _read_header(file, checksum) != layout.header:
                return None
            if status.st_size != layout.total:
                raise _Unusable(f"it has {status.st_size} bytes instead of {layout.total}")
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EIO, errno.EISDIR):  # such as no descriptors, no memory
            raise
        raise _Unusable(f"it cannot be read ({error.strerror})") from error
    with suppress(AttributeError, OSError):  # not on every system, and not on every kernel for files
        mapped.madvise(mmap.MADV_HUGEPAGE)
    mapped.madvise(mmap.MADV_WILLNEED)
    content = np.frombuffer(mapped, np.uint8)
    # The first step needs every page of it anyway. Here several threads bring them in.
    if layout.checksums(content, checksum, threads) != bytes(content[layout.end :]):
        raise _Unusable("its content does not have the checksums that it was written with")
    return {name: content[place] for name, place in layout.places.items()}


def _make(path: Path, layout: _Layout, fill: Fill, checksum: Checksum, threads: int) -> None:
    partial = partial_path(path)
    # Whatever the umask allows, others may not write: `_check_owner`.
    with open(partial, "w+b", opener=lambda name, flags: os.open(name, flags, 0o644)) as file:
        os.posix_fallocate(file.fileno(), 0, layout.total)  # no room is an error here, not a signal later
        _write(np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint8), layout, fill, checksum, threads)
        os.fsync(file.fileno())
        # Written a page at a time, it lies in small pages. Dropped from the cache, it is read again in large ones.
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    partial.replace(path)


def _write(content: np.ndarray, layout: _Layout, fill: Fill, checksum: Checksum, threads: int) -> None:
    """Packed straight into the file: the weights are never in memory as a whole."""
    content[: len(layout.header)] = _array(layout.header)
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda name: fill(name, content[layout.places[name]]), layout.places))
    content[layout.end :] = _array(layout.checksums(content, checksum, threads))


def _make_private(folder: Path) -> None:
    """Makes the folder where it is missing, and lets only its owner write to it."""
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_mode & _WRITABLE_BY_OTHERS and status.st_uid == os.geteuid():
        folder.chmod(status.st_mode & 0o7777 & ~_WRITABLE_BY_OTHERS)
        status = folder.stat()
    try:
        _check_owner(status)
    except _Unusable as reason:
        raise _Unusable(f"{folder}: {reason}") from None


def _check_owner(status: os.stat_result) -> None:
    if status.st_uid not in (os.geteuid(), 0):
        raise _Unusable(f"it belongs to user {status.st_uid}, neither to this one nor to root")
    if status.st_mode & _WRITABLE_BY_OTHERS:
        raise _Unusable(f"others than its owner may write to it (mode {status.st_mode & 0o777:o})")


def _set_aside(path: Path, reason: _Unusable) -> None:
    aside = path.with_suffix(".damaged")
    _log.warning("%s: %s; it is set aside as %s and made again", path, reason, aside.name)
    path.replace(aside)


def _sweep(path: Path, checksum: Checksum) -> None:
    """Deletes what no start will use again. The lock is held: a file that is not finished will never be."""
    for other in path.parent.iterdir():
        with suppress(OSError):
            if other != path.with_suffix(".damaged") and _is_obsolete(other, _version(path), checksum):
                other.unlink()


def _is_obsolete(file: Path, newest: int, checksum: Checksum) -> bool:
    """Damaged, unfinished, of an older version, or of a model that is gone."""
    version = _version(file)
    if file.suffix == ".damaged":
        return True
    if version != newest or file.suffix != ".packed" or file.name.startswith("."):
        return 0 <= version <= newest
    try:
        with file.open("rb") as opened:
            header = _read_header(opened, checksum)
        _, sources = json.loads(json.loads(header[len(_MAGIC) + 16 :])["from"])
        return not all(os.path.exists(source) for source, *_ in sources)
    except _Unusable:
        return True


def _version(file: Path) -> int:
    """-1: not one of ours."""
    found = re.search(r"-(\d+)\.(?:packed|lock)$", file.name)
    return -1 if found is None else int(found[1])


def _read_header(file: BinaryIO, checksum: Checksum) -> bytes:
    """What the file begins with, up to the end of its header, whatever that says."""
    start = file.read(len(_MAGIC) + 16)
    length = int.from_bytes(start[-8:], "little")
    described = file.read(min(length, _MAX_HEADER_BYTES))
    if start != _MAGIC + _eight(checksum(_array(described))) + _eight(len(described)):
        raise _Unusable("its header is damaged")
    return start + described


def _folder() -> Path:
    return models_directory().parent / "packed"


def _name(model: Path) -> str:
    place = hashlib.sha256(os.fsencode(model.resolve())).hexdigest()[:12]
    return f"{model.stem}-{place}"


def _array(content: bytes) -> np.ndarray:
    return np.frombuffer(content, np.uint8)


def _eight(number: int) -> bytes:
    return number.to_bytes(8, "little")
