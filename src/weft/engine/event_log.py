"""The file of an engine's event log. Each start of an engine begins a new file and keeps the older ones.

A log contains prompts, so only its owner may read it. When a write fails, the log is cut after its last whole line, and
the engine continues without a log.
"""

from __future__ import annotations

import errno
import logging
import os
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

from weft.errors import InvalidRequestError

_KEPT = 5
"""Older logs that are kept. NAME.1 is the newest of them."""
_LOOP_SECONDS = 600.0
"""Logs that ended within this time of each other come from a crash loop. The first of them shows its cause."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)
"""Errors of a disk that is full or broken. The engine then starts without a log; other errors mean a wrong `log_path`."""

_log = logging.getLogger(__name__)


class EventLog:
    """Owns the file. Lines are not buffered: after a crash the last lines matter most."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._size = 0
        """Bytes of complete lines. After a failed write the file is truncated to this size."""
        self._file: int | None = None
        try:
            self._file = _open(Path(os.path.realpath(path)))
        except OSError as error:
            if error.errno not in _FULL:
                raise InvalidRequestError(
                    f"log_path {path!r} cannot be written: {error}", field="log_path"
                ) from error
            self._stop_writing(error)

    def write(self, line: bytes) -> None:
        """Writes a line. Never raises: a broken log must not fail a request."""
        if self._file is None:
            return
        try:
            left = memoryview(line)
            while left:
                left = left[os.write(self._file, left) :]
            self._size += len(line)
        except OSError as error:
            self._stop_writing(error)

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _stop_writing(self, error: OSError) -> None:
        _log.warning(
            "log_path %r cannot be written any more: %s. The log ends after %d bytes; the engine continues without it",
            self._path,
            error.strerror or error,
            self._size,
        )
        if self._file is not None:
            with suppress(OSError):  # the log may be a device, which cannot be truncated
                os.ftruncate(self._file, self._size)
        self.close()


def _open(path: Path) -> int:
    """Creates a file that only its owner may read. An existing file is renamed first. Devices and pipes are opened as
    they are."""
    if path.exists() and not path.is_file():
        return os.open(path, os.O_WRONLY)
    if path.exists() and path.stat().st_size:
        names = [path, *(path.with_name(f"{path.name}.{number}") for number in range(1, _KEPT + 1))]
        for newer, older in reversed([*pairwise(names[: _least_useful(names) + 1])]):
            with suppress(FileNotFoundError):
                newer.chmod(0o600)
                newer.replace(older)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.fchmod(file, 0o600)  # an existing empty file would keep its old mode
    return file


def _least_useful(names: list[Path]) -> int:
    """The index of the older log to replace; the newest is first. Usually it is the last. If all names are in use and two
    older logs ended soon after each other, it is the newer of these: the first log of a crash loop is kept."""
    try:
        ended = [name.stat().st_mtime for name in names[1:]]
    except FileNotFoundError:
        return _KEPT
    gaps = [newer - older for newer, older in pairwise(ended)]
    return 1 + gaps.index(min(gaps)) if min(gaps) < _LOOP_SECONDS else _KEPT
