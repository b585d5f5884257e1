"""The folder that models are kept in: where it is, who may write to it, and how a fetch says how far it is."""

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
    """How far one stage has come: "wait" (another process is pulling), "find", "download", "unpack" or "check".

    A stage whose end is not known has a total of 0.
    """

    stage: str
    done_bytes: int = 0
    total_bytes: int = 0


Progress = Callable[[PullProgress], None]


def models_directory() -> Path:
    """Where models are kept: under WEFT_HOME, or under the user's cache directory."""
    home, cache = os.environ.get("WEFT_HOME"), os.environ.get("XDG_CACHE_HOME")
    try:
        if home:
            return Path(home).expanduser() / "models"
        return (Path(cache) if cache else Path.home() / ".cache") / "weft" / "models"
    except RuntimeError as error:  # a '~' of somebody who has no home directory
        raise ModelFileError(
            f"{home or '~'}: there is no such home directory; set WEFT_HOME to the folder to keep models in"
        ) from error


def partial_path(target: Path) -> Path:
    """Where a file is while it is not whole: beside its place, so that it can be moved there in one step."""
    return target.with_name(f".partial-{target.name}")


@contextmanager
def only_one_pull(lock_path: Path, progress: Progress, seconds: float = math.inf) -> Iterator[None]:
    """A lock that the kernel releases when its holder dies. Raises TimeoutError after `seconds` of waiting."""
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
def errors_of_the_disk(directory: Path) -> Iterator[None]:
    """Says in whose folder the disk refused, and what can be done."""
    try:
        yield
    except OSError as error:
        raise ModelFileError(
            f"{directory}: the model cannot be kept there: {error.strerror or error}. "
            "Set WEFT_HOME to a folder that can be written and has room"
        ) from error


def require_room(directory: Path, needed_bytes: int) -> None:
    """Refuses before the first byte what would fill the disk after an hour."""
    free = shutil.disk_usage(directory).free
    if needed_bytes > free:
        raise ModelFileError(
            f"{directory}: {needed_bytes >> 20} MiB are needed to fetch the model and {free >> 20} MiB are free; "
            "make room, or set WEFT_HOME to a folder on another disk"
        )


def move_into_place(source: Path, target: Path) -> None:
    """Gives a file its final name in one step, once all of it is on the disk."""
    with source.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(source, target)
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
