"""Owns the lock file of this process. Other processes test it to learn whether this process still runs.

A row of unfinished work has the name of the process that began it. The file with this name is in the folder `workers`
of the store. The kernel releases its lock when the process ends, also after a crash.
"""

from __future__ import annotations

import fcntl
import os
import uuid
from contextlib import suppress
from pathlib import Path


class ProcessLock:
    """The identity of this process: a random name, and a locked file with this name."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "workers"
        self.name = uuid.uuid4().hex
        self._file: int | None = None

    def begin(self) -> None:
        """Locks the file of this process. Runs in the thread of the store."""
        if self._file is None:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._file = os.open(self._folder / self.name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._file, fcntl.LOCK_EX)

    def is_alive(self, name: str | None) -> bool:
        """Whether the process with this name runs. Removes its file if it has ended."""
        if name is None or name == self.name:
            return name is not None
        path = self._folder / name
        try:
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(file)
        with suppress(OSError):
            path.unlink()
        return False

    def close(self) -> None:
        if self._file is not None:
            with suppress(OSError):
                (self._folder / self.name).unlink()
            os.close(self._file)
            self._file = None
