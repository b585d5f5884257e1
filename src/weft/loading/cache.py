"""The local model cache: its path, its lock, its disk errors, and the progress of a pull."""

from __future__ import annotations

import fcntl
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from weft.errors import ModelFileError


@dataclass(frozen=True)
class PullProgress:
    """Progress of one stage: "wait" (another process is pulling), "find", "download", "unpack" or "check".

    `total_bytes` is 0 if the total is unknown.
    """

    stage: str
    done_bytes: int = 0
    total_bytes: int = 0


Progress = Callable[[PullProgress], None]


def models_directory() -> Path:
    """The folder of downloaded models."""
    return home_directory() / "models"


def home_directory() -> Path:
    """The folder of everything that weft keeps: WEFT_HOME, else a folder in the user's cache directory."""
    home, cache = os.environ.get("WEFT_HOME"), os.environ.get("XDG_CACHE_HOME")
    try:
        if home:
            return Path(home).expanduser()
        return (Path(cache) if cache else Path.home() / ".cache") / "weft"
    except RuntimeError as error:  # '~' or '~name' without a home directory
        raise ModelFileError(
            f"{home or '~'}: there is no such home directory; set WEFT_HOME to the folder to keep models in"
        ) from error


def partial_path(target: Path) -> Path:
    """The path of an incomplete file: in the folder of `target`, so that one rename completes it."""
    return target.with_name(f".partial-{target.name}")


@contextmanager
def exclusive_lock(lock_path: Path, progress: Progress, seconds: float = math.inf) -> Iterator[None]:
    """Holds a file lock, so that one process at a time writes. The kernel releases the lock when the process dies.

    Raises TimeoutError after `seconds` of waiting.
    """
    lock_path.parent.mkdir(parents=True, exist_ok=True)
    with lock_path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(PullProgress("wait"))
            if seconds == math.inf:
                fcntl.flock(lock, fcntl.LOCK_EX)
            else:
                _lock_within(lock, seconds)
        yield


def _lock_within(lock: IO[str], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise TimeoutError(f"another process held {lock.name} for {seconds:g} s") from None
        time.sleep(0.05)


@contextmanager
def report_disk_errors(directory: Path) -> Iterator[None]:
    """Turns an `OSError` into a `ModelFileError` that names the folder and what to do."""
    try:
        yield
    except OSError as error:
        raise ModelFileError(
            f"{directory}: the model cannot be kept there: {error.strerror or error}. "
            "Set WEFT_HOME to a writable folder with enough free space"
        ) from error


def require_free_space(directory: Path, needed_bytes: int) -> None:
    """Fails before the download starts if the disk is too small for it."""
    free = shutil.disk_usage(directory).free
    if needed_bytes > free:
        raise ModelFileError(
            f"{directory}: the download needs {needed_bytes >> 20} MiB and {free >> 20} MiB are free; "
            "free some space, or set WEFT_HOME to a folder on another disk"
        )


def move_into_place(source: Path, target: Path) -> None:
    """Renames a file to its final name, after fsync: a crash cannot leave a truncated file under that name."""
    with source.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(source, target)
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
