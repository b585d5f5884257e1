"""The file of an engine's event log: one file for each start of an engine, with the older ones beside it.

A log holds prompts, so only its owner may read it. Where it cannot be written any more it ends with a whole line, and
the engine goes on without it.
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
"""Logs of earlier starts: NAME.1 is of the start before this one."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)

_log = logging.getLogger(__name__)


class EventLog:
    """Owns the file. A line is written as soon as it is there: after a crash the last lines are the ones that matter."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._size = 0
        """Of the lines that are whole."""
        self._file: int | None = None
        try:
            self._file = _open(Path(os.path.realpath(path)))
        except OSError as error:
            if error.errno not in _FULL:
                raise InvalidRequestError(
                    f"log_path {path!r} cannot be written: {error}", field="log_path"
                ) from error
            self._give_up(error)

    def write(self, line: bytes) -> None:
        """Never raises: a log is not worth a request."""
        if self._file is None:
            return
        try:
            left = memoryview(line)
            while left:
                left = left[os.write(self._file, left) :]
            self._size += len(line)
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _give_up(self, error: OSError) -> None:
        _log.warning(
            "log_path %r cannot be written any more: %s. The log ends after %d bytes, and the engine goes on without it",
            self._path,
            error.strerror or error,
            self._size,
        )
        if self._file is not None:
            with suppress(OSError):  # a device has no end to move
                os.ftruncate(self._file, self._size)
        self.close()


def _open(path: Path) -> int:
    """A new file of this name, for its owner alone; what it holds already is kept under another name. A device or a
    pipe is taken as it is."""
    if path.exists() and not path.is_file():
        return os.open(path, os.O_WRONLY)
    if path.exists() and path.stat().st_size:
        names = [path, *(path.with_name(f"{path.name}.{number}") for number in range(1, _KEPT + 1))]
        for newer, older in reversed([*pairwise(names)]):
            with suppress(FileNotFoundError):
                newer.chmod(0o600)
                newer.replace(older)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.fchmod(file, 0o600)  # an empty one that was there
    return file
