"""Cache files of packed weights: a model's tensors in the layout of this machine's kernels. Later starts only map them.

    magic | header checksum (u64) | header length (u64) | header | zeros up to a page boundary
    packed tensors, each at a multiple of 64 bytes
    checksums of everything above, a u64 for every 4 MiB

The header lists the source files, and each packed tensor with its size. A file with another header is replaced. All
checksums are verified before use. A file that is damaged, or writable by other users, is renamed and replaced.
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

from weft.loading.cache import exclusive_lock, models_directory, partial_path

_MAGIC = b"weft packed weights\n"
_PAGE = 4096
_ALIGNMENT = 64
_PART_BYTES = 4 << 20
_MAX_HEADER_BYTES = 64 << 20
_WRITABLE_BY_OTHERS = 0o022
_LOCK_SECONDS = 60.0
"""The longest wait for another process that packs weights into the same folder. An engine that waited much longer would
count as stalled (`stall_seconds`)."""

Sizes = Mapping[str, int]
Fill = Callable[[str, np.ndarray], None]
Checksum = Callable[[np.ndarray], int]
"""Returns 64 bits. Called by several threads at once."""

_log = logging.getLogger(__name__)


class _Unusable(Exception):
    """An existing file or folder must not be used. The message says why."""


def packed_path(model: Path, variant: str) -> Path:
    """The cache file of a model's packed weights: one for each path of a model and each `variant` of the packing.

    `variant` ends with the version number of the packing.
    """
    return _folder() / f"{_name(model)}-{variant}.packed"


def packed_files(model: Path) -> list[Path]:
    """All cache files of a model: every variant and version, including damaged and incomplete ones."""
    return sorted(_folder().glob(f"*{glob.escape(_name(model))}-*"))


def identity_of(files: Iterable[Path], variant: str) -> str:
    """Identifies the model files and the variant of the packing. It changes with the path, size or modification time of
    a file."""
    stated = sorted((str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in files)
    return json.dumps([variant, stated])


def open_packed(
    path: Path, identity: str, sizes: Sizes, fill: Fill, checksum: Checksum, threads: int
) -> dict[str, np.ndarray] | None:
    """Maps the packed tensors from the file at `path`, by name. Creates the file if it is missing, damaged or outdated.

    None if the file cannot be created: no disk space, no write permission, a folder of another user, or another process
    that has been packing for too long. Then the caller packs the weights in memory.
    """
    layout = _Layout.of(identity, sizes, checksum)
    try:
        _make_private(path.parent)
        with suppress(_Unusable):  # handled below, under the lock: another process may be replacing the file
            if (tensors := _map(path, layout, checksum, threads)) is not None:
                return tensors
        with exclusive_lock(path.parent / ".lock", lambda progress: None, _LOCK_SECONDS):
            try:
                if (tensors := _map(path, layout, checksum, threads)) is not None:
                    return tensors
            except _Unusable as reason:
                _set_aside(path, reason)
            _delete_obsolete(path, checksum)
            if shutil.disk_usage(path.parent).free < layout.total + layout.total // 8:
                return None
            _create(path, layout, fill, checksum, threads)
            return _map(path, layout, checksum, threads)
    except _Unusable as reason:
        _log.warning("%s: the folder is not used; every start packs the weights again", reason)
    except OSError:
        pass
    return None


@dataclass(frozen=True)
class _Layout:
    header: bytes
    """The start of the file, up to the end of the JSON header."""
    places: Mapping[str, slice]
    """The byte range of each packed tensor."""
    end: int
    """The end of the last packed tensor. The checksums follow."""

    @classmethod
    def of(cls, identity: str, sizes: Sizes, checksum: Checksum) -> _Layout:
        described = json.dumps({"from": identity, "pieces": list(sizes.items())}).encode()
        header = _MAGIC + _u64(checksum(_array(described))) + _u64(len(described)) + described
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
        """The byte ranges that have one checksum each."""
        return [slice(start, min(start + _PART_BYTES, self.end)) for start in range(0, self.end, _PART_BYTES)]

    def checksums(self, content: np.ndarray, checksum: Checksum, threads: int) -> bytes:
        with ThreadPoolExecutor(threads) as pool:
            return b"".join(map(_u64, pool.map(lambda part: checksum(content[part]), self.parts)))


def _map(path: Path, layout: _Layout, checksum: Checksum, threads: int) -> dict[str, np.ndarray] | None:
    """Maps the file and checks it. None: the file does not exist, or holds other weights."""
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
        if error.errno not in (errno.EACCES, errno.EIO, errno.EISDIR):
            raise  # for example out of file descriptors or memory
        raise _Unusable(f"it cannot be read ({error.strerror})") from error
    # Some systems do not have MADV_HUGEPAGE, or only for memory without a file.
    with suppress(AttributeError, OSError):
        mapped.madvise(mmap.MADV_HUGEPAGE)
    mapped.madvise(mmap.MADV_WILLNEED)
    content = np.frombuffer(mapped, np.uint8)
    # Checking every page costs little extra: the first step needs all pages anyway, and here several threads read them.
    if layout.checksums(content, checksum, threads) != bytes(content[layout.end :]):
        raise _Unusable("its content does not have the checksums that it was written with")
    return {name: content[place] for name, place in layout.places.items()}


def _create(path: Path, layout: _Layout, fill: Fill, checksum: Checksum, threads: int) -> None:
    """Writes the file under a temporary name, and then renames it."""
    partial = partial_path(path)
    # `_check_owner` rejects files that others may write, so do not rely on the umask.
    with open(partial, "w+b", opener=lambda name, flags: os.open(name, flags, 0o644)) as file:
        os.posix_fallocate(file.fileno(), 0, layout.total)  # a full disk fails here, not with SIGBUS later
        _write(np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint8), layout, fill, checksum, threads)
        os.fsync(file.fileno())
        # Writing filled the page cache with small pages. They are dropped, so that the next read uses large pages.
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    partial.replace(path)


def _write(content: np.ndarray, layout: _Layout, fill: Fill, checksum: Checksum, threads: int) -> None:
    """Packs directly into the mapped file, so that no second copy of the weights is in memory."""
    content[: len(layout.header)] = _array(layout.header)
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda name: fill(name, content[layout.places[name]]), layout.places))
    content[layout.end :] = _array(layout.checksums(content, checksum, threads))


def _make_private(folder: Path) -> None:
    """Creates the folder if it is missing, and removes the write permission of other users."""
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
        raise _Unusable(f"it belongs to user {status.st_uid}, not to user {os.geteuid()} or root")
    if status.st_mode & _WRITABLE_BY_OTHERS:
        raise _Unusable(f"other users may write to it (mode {status.st_mode & 0o777:o})")


def _set_aside(path: Path, reason: _Unusable) -> None:
    aside = path.with_suffix(".damaged")
    try:
        _delete(aside)  # a file cannot replace a folder, and a folder cannot replace a file
        path.replace(aside)
    except OSError as error:
        raise _Unusable(f"{path}: {reason}, and it cannot be renamed ({error})") from error
    _log.warning("%s: %s; it is renamed to %s and created again", path, reason, aside.name)


def _delete(path: Path) -> None:
    """Deletes a file, or a folder with its content."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _delete_obsolete(path: Path, checksum: Checksum) -> None:
    """Deletes files that no start will use again. The caller holds the lock, so no process is writing a file now."""
    for other in path.parent.iterdir():
        with suppress(OSError):
            if other != path.with_suffix(".damaged") and _is_obsolete(other, _version(path), checksum):
                _delete(other)


def _is_obsolete(file: Path, newest: int, checksum: Checksum) -> bool:
    """Whether the file is damaged, incomplete, of an older version, or of a model that no longer exists."""
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
    """The version of the packing, from the file name. -1: not a file of packed weights."""
    found = re.search(r"-(\d+)\.(?:packed|lock)$", file.name)
    return -1 if found is None else int(found[1])


def _read_header(file: BinaryIO, checksum: Checksum) -> bytes:
    """The start of the file up to the end of its header, with the header's checksum verified."""
    start = file.read(len(_MAGIC) + 16)
    length = int.from_bytes(start[-8:], "little")
    described = file.read(min(length, _MAX_HEADER_BYTES))
    if start != _MAGIC + _u64(checksum(_array(described))) + _u64(len(described)):
        raise _Unusable("its header is damaged")
    return start + described


def _folder() -> Path:
    return models_directory().parent / "packed"


def _name(model: Path) -> str:
    place = hashlib.sha256(os.fsencode(model.resolve())).hexdigest()[:12]
    return f"{model.stem}-{place}"


def _array(content: bytes) -> np.ndarray:
    return np.frombuffer(content, np.uint8)


def _u64(number: int) -> bytes:
    return number.to_bytes(8, "little")
