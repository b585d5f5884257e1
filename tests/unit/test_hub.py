"""Pulling from the hub: the real client library against a small local server with the hub's routes."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import huggingface_hub.constants
import pytest

from weft.errors import ModelFileError
from weft.loading import cache, download
from weft.loading.cache import PullProgress, models_directory
from weft.loading.hub import HubModel, parse_hub_name
from weft.loading.pull import cached_models, pull, remove

DATA = bytes(range(256)) * 20_000
HEADER = json.dumps(
    {"w": {"dtype": "F32", "shape": [len(DATA) // 4], "data_offsets": [0, len(DATA)]}}
).encode()
WEIGHTS = len(HEADER).to_bytes(8, "little") + HEADER + DATA
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "model.safetensors": WEIGHTS,
    "consolidated.safetensors": b"the same weights once more",
    "pytorch_model.bin": b"a pickle",
    "modeling_evil.py": b"import os",
    "onnx/model.onnx": b"something else",
    "onnx/config.json": b"{}",
}
LARGE = 1000
"""From this size on, the server has a file as an LFS file with a SHA-256; smaller ones have git's checksum."""


class Hub(ThreadingHTTPServer):
    """A local hub with one repository. `commits` maps a commit to its files; `revisions` names commits."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.commits: dict[str, dict[str, bytes]] = {"a" * 40: dict(FILES)}
        self.revisions = {"main": "a" * 40}
        self.served: dict[tuple[str, str], bytes] = {}
        """Wrong content to send for (commit, file name)."""
        self.gated = False
        self.token: str | None = None
        self.ranges = True
        self.storage: str | None = None
        """Another host, to which the hub redirects downloads."""
        self.redirects_only_get = False
        """HEAD is answered without a redirect, as by some mirrors."""
        self.tokens_at_storage: list[str | None] = []
        self.stop_after: int | None = None
        """Each response ends after this many bytes."""
        self.hang_after: int | None = None
        self.hanging = threading.Event()
        self.requests: list[tuple[str, str, str | None]] = []
        self.bytes_sent = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def downloads(self) -> list[tuple[str, str | None]]:
        return [
            (path.rpartition("/")[2], span)
            for method, path, span in self.requests
            if method == "GET" and "/resolve/" in path
        ]


class Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.requests.append((self.command, path, self.headers.get("Range")))
        found = re.fullmatch(r"/api/models/(.+?)/revision/(.+)", path)
        if found:
            self._info(found[1], found[2])
        elif found := re.fullmatch(r"/(.+?)/resolve/([^/]+)/(.+)", path):
            self._file(found[1], found[2], found[3])
        else:
            self._answer(404, b"", {"X-Error-Code": "RepoNotFound"})

    def _info(self, repository: str, revision: str) -> None:
        commit = self.server.revisions.get(revision, revision)
        if repository != "owner/name":
            return self._answer(404, b"", {"X-Error-Code": "RepoNotFound"})
        if commit not in self.server.commits:
            return self._answer(404, b"", {"X-Error-Code": "RevisionNotFound"})
        siblings = []
        for name, content in self.server.commits[commit].items():
            sibling: dict[str, object] = {
                "rfilename": name,
                "size": len(content),
                "blobId": git_digest(content),
            }
            if len(content) >= LARGE:
                sibling["lfs"] = {
                    "sha256": hashlib.sha256(content).hexdigest(),
                    "size": len(content),
                    "pointerSize": 1,
                }
            siblings.append(sibling)
        body = {"id": repository, "modelId": repository, "sha": commit, "siblings": siblings, "tags": []}
        return self._answer(200, json.dumps(body).encode(), {"Content-Type": "application/json"})

    def _file(self, repository: str, commit: str, name: str) -> None:
        if self.server.gated and self.headers.get("Authorization") != f"Bearer {self.server.token}":
            return self._answer(403, b"", {"X-Error-Code": "GatedRepo"})
        commit = self.server.revisions.get(commit, commit)
        content = self.server.commits[commit][name]
        is_unredirected = self.command == "HEAD" and self.server.redirects_only_get
        if self.server.storage and self.headers["Host"] not in self.server.storage and not is_unredirected:
            headers = {"Location": self.server.storage + self.path, "X-Repo-Commit": commit}
            headers |= {"X-Linked-ETag": f'"{git_digest(content)}"', "X-Linked-Size": str(len(content))}
            return self._answer(302, b"", headers)
        if not is_unredirected:
            self.server.tokens_at_storage.append(self.headers.get("Authorization"))
        sent = self.server.served.get((commit, name), content)
        headers = {
            "ETag": f'"{hashlib.sha256(content).hexdigest() if len(content) >= LARGE else git_digest(content)}"',
            "X-Repo-Commit": commit,
            "Accept-Ranges": "bytes",
        }
        span = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        if span and self.server.ranges:
            start = int(span[1])
            headers["Content-Range"] = f"bytes {start}-{len(sent) - 1}/{len(sent)}"
            return self._answer(206, sent[start:], headers)
        return self._answer(200, sent, headers)

    def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        end = min(
            (n for n in (self.server.stop_after, self.server.hang_after) if n is not None), default=len(body)
        )
        self.wfile.write(body[:end])
        self.wfile.flush()
        self.server.bytes_sent += len(body[:end])
        if end < len(body):
            self.close_connection = True
            if self.server.hang_after is not None:
                self.server.hanging.set()
                threading.Event().wait(30)


def git_digest(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    server = Hub()
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    for name in [name for name in os.environ if name.startswith("HF_") or name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    # The environment is for processes that tests start. In this process huggingface_hub has read it already.
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("WEFT_HOME", str(tmp_path / "home"))
    for name, value in {
        "ENDPOINT": server.url,
        "HUGGINGFACE_CO_URL_TEMPLATE": server.url + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_CACHE": str(tmp_path / "hf" / "hub"),
        "HF_TOKEN_PATH": str(tmp_path / "hf" / "token"),
    }.items():
        monkeypatch.setattr(huggingface_hub.constants, name, value)
    monkeypatch.setattr(download, "_WAITS_SECONDS", (0.0, 0.0))
    yield server
    server.shutdown()
    server.server_close()


def run_pull(model: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "weft.cli.main", "pull", model],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
    )


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def gguf_repository(hub: Hub, *names: str) -> None:
    hub.commits["a" * 40] = {name: name.encode() * 500 for name in names} | {"README.md": b"read me"}


# --- downloaded files -------------------------------------------------------------------------------------------


def test_a_pull_downloads_safetensors_and_json_files_and_never_code_or_pickles(hub: Hub) -> None:
    events: list[PullProgress] = []
    folder = pull("hf:owner/name", events.append)
    names = ("config.json", "tokenizer.json", "model.safetensors")
    assert contents(folder) == {name: FILES[name] for name in names}
    total = sum(len(FILES[name]) for name in names)
    assert events[-1] == PullProgress("download", total, total)
    done = [event.done_bytes for event in events if event.stage == "download"]
    assert done == sorted(done)


def test_the_modules_of_an_embedding_model_are_downloaded_with_their_folders(hub: Hub) -> None:
    modules = {
        "modules.json": b"[]",
        "1_Pooling/config.json": b"{}",
        "2_Dense/config.json": b"{}",
        "2_Dense/model.safetensors": b"weights",
    }
    commit = next(iter(hub.commits))
    others = {"2_Dense/pytorch_model.bin": b"pickle", "onnx/config.json": b"{}", "1_Pooling/code.py": b"code"}
    hub.commits[commit] = {**hub.commits[commit], **modules, **others}
    found = contents(pull("hf:owner/name"))
    assert {name: found.get(name) for name in modules} == modules
    assert not others.keys() & found.keys()


def test_a_pulled_model_needs_no_network_afterwards(hub: Hub) -> None:
    folder = pull("hf:owner/name")
    hub.shutdown()
    requests = len(hub.requests)
    events: list[PullProgress] = []
    assert pull("hf:owner/name", events.append) == folder
    assert events == [] and len(hub.requests) == requests


def test_a_second_pull_downloads_only_damaged_files(hub: Hub) -> None:
    folder = pull("hf:owner/name")
    before = len(hub.downloads())
    pull("hf:owner/name", verify=True)
    assert len(hub.downloads()) == before
    (folder / "model.safetensors").write_bytes(bytes(len(WEIGHTS)))
    pull("hf:owner/name", verify=True)
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert len(hub.downloads()) == before + 1
    (folder / "model.safetensors").write_bytes(WEIGHTS[:-1])
    pull("hf:owner/name")
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS


def test_verify_downloads_the_changed_files_of_a_newer_commit(hub: Hub) -> None:
    old = pull("hf:owner/name")
    hub.commits["b" * 40] = {**FILES, "config.json": b'{"model_type": "qwen2"}'}
    hub.revisions["main"] = "b" * 40
    assert pull("hf:owner/name") == old, "a pull without verify must not look for a newer commit"
    hub.requests.clear()
    new = pull("hf:owner/name", verify=True)
    assert [name for name, _ in hub.downloads()] == ["config.json"]
    assert (new / "config.json").read_bytes() == b'{"model_type": "qwen2"}'
    assert (new / "model.safetensors").read_bytes() == WEIGHTS
    assert not old.exists()


def test_two_revisions_are_cached_separately(hub: Hub) -> None:
    hub.commits["b" * 40] = {**FILES, "config.json": b"{}"}
    hub.revisions["v2"] = "b" * 40
    first, second = pull("hf:owner/name"), pull("hf:owner/name@v2")
    assert first != second and first.exists() and second.exists()
    assert [kept.name for kept in cached_models()] == ["hf:owner/name", "hf:owner/name@v2"]
    remove("hf:owner/name@v2")
    assert first.exists() and not second.exists()


def test_files_in_the_cache_of_huggingface_hub_are_used(hub: Hub) -> None:
    huggingface_hub.hf_hub_download("owner/name", "model.safetensors")
    hub.requests.clear()
    folder = pull("hf:owner/name")
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert [name for name, _ in hub.downloads()] == ["config.json", "tokenizer.json"]


def test_a_gguf_file_is_chosen_if_it_is_the_only_one_or_by_name_or_by_quantisation(hub: Hub) -> None:
    gguf_repository(hub, "m.Q4_K_M.gguf", "m.Q4_K_S.gguf", "sub/m-q8_0.gguf", "mmproj-m.gguf")
    assert pull("hf:owner/name/sub/m-q8_0.gguf").read_bytes() == b"sub/m-q8_0.gguf" * 500
    assert pull("hf:owner/name:Q8_0").name == "m-q8_0.gguf"
    assert pull("hf:owner/name:Q4_K_M").name == "m.Q4_K_M.gguf"
    with pytest.raises(ModelFileError, match=r"has 3 GGUF models; name one: hf:owner/name/m\.Q4_K_M\.gguf, "):
        pull("hf:owner/name")
    with pytest.raises(ModelFileError, match=r"has 3 GGUF models; none of them match Q4_K; name one"):
        pull("hf:owner/name:Q4_K")
    gguf_repository(hub, "only.gguf")
    assert pull("hf:owner/name").name == "only.gguf"


def test_all_files_of_a_split_gguf_model_are_downloaded(hub: Hub) -> None:
    parts = [f"big/m-Q8_0-{number:05}-of-00003.gguf" for number in (1, 2, 3)]
    gguf_repository(hub, *parts)
    first = models_directory() / "hub" / "owner--name" / ("a" * 40) / parts[0]
    for name in ("hf:owner/name", "hf:owner/name:Q8_0", f"hf:owner/name/{parts[0]}"):
        assert pull(name) == first
        assert sorted(contents(first.parent)) == [Path(part).name for part in parts]
    with pytest.raises(
        ModelFileError, match=r"none of them match .*-00002-.*; name one: hf:.*-00001-of-00003\.gguf$"
    ):
        pull(f"hf:owner/name/{parts[1]}")
    gguf_repository(hub, *parts, "small-Q4_0.gguf")
    with pytest.raises(ModelFileError, match="has 2 GGUF models; name one"):
        pull("hf:owner/name", verify=True)
    assert pull("hf:owner/name:Q4_0").name == "small-Q4_0.gguf"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"config.json": b"{}", "pytorch_model.bin": b"x"}, "only as pytorch_model.bin, a pickle"),
        ({"README.md": b"x"}, "neither safetensors with a config.json nor a GGUF file"),
        ({"m-00001-of-00002.gguf": b"x"}, "m-00002-of-00002.gguf is missing: .* 1 of the 2 files"),
        ({"../../escape.gguf": b"x"}, "neither safetensors"),
    ],
)
def test_the_error_for_a_repository_without_a_readable_model_names_the_reason(
    hub: Hub, files: dict[str, bytes], message: str
) -> None:
    hub.commits["a" * 40] = files
    with pytest.raises(ModelFileError, match=message):
        pull("hf:owner/name")
    assert cached_models() == []


# --- failed transfers -------------------------------------------------------------------------------------------


def test_a_killed_pull_leaves_no_model_and_the_next_pull_resumes_it(hub: Hub) -> None:
    hub.hang_after = 3_000_000
    command = [sys.executable, "-m", "weft.cli.main", "pull", "hf:owner/name"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL) as process:
        assert hub.hanging.wait(120)
        folder = models_directory() / "hub" / "owner--name" / ("a" * 40)
        partial = folder / ".partial-model.safetensors"
        while not partial.exists() or partial.stat().st_size < 2_000_000:
            assert process.poll() is None
        process.send_signal(signal.SIGKILL)
    received = partial.stat().st_size
    (incomplete,) = cached_models()
    assert incomplete.name == "hf:owner/name"
    assert incomplete.problem and "the download is incomplete" in incomplete.problem
    assert incomplete.size > received and not (folder / "model.safetensors").exists()
    hub.hang_after = None
    hub.requests.clear()
    assert (pull("hf:owner/name") / "model.safetensors").read_bytes() == WEIGHTS
    assert hub.downloads() == [("model.safetensors", f"bytes={received}-")], (
        "the small files must not be downloaded again"
    )
    assert not partial.exists()


def test_a_connection_that_keeps_breaking_is_resumed_as_long_as_bytes_arrive(hub: Hub) -> None:
    hub.stop_after = 1_500_000
    assert (pull("hf:owner/name") / "model.safetensors").read_bytes() == WEIGHTS
    spans = [span for name, span in hub.downloads() if name == "model.safetensors"]
    assert spans == [None, "bytes=1500000-", "bytes=3000000-", "bytes=4500000-"]


def test_a_server_without_ranges_is_read_from_the_start(hub: Hub) -> None:
    folder = models_directory() / "hub" / "owner--name" / ("a" * 40)
    folder.mkdir(parents=True)
    (folder / ".partial-model.safetensors").write_bytes(b"!" * 1000)
    hub.ranges = False
    assert (pull("hf:owner/name") / "model.safetensors").read_bytes() == WEIGHTS


def test_a_partial_file_of_other_content_is_downloaded_again(hub: Hub) -> None:
    folder = models_directory() / "hub" / "owner--name" / ("a" * 40)
    folder.mkdir(parents=True)
    (folder / ".partial-model.safetensors").write_bytes(b"!" * 1000)
    assert (pull("hf:owner/name") / "model.safetensors").read_bytes() == WEIGHTS


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
@pytest.mark.parametrize("change", ["flipped", "longer", "shorter"])
def test_content_that_differs_from_the_hubs_listing_is_refused_and_not_kept(
    hub: Hub, name: str, change: str
) -> None:
    right = FILES[name]
    wrong = {"flipped": right[:-1] + b"!", "longer": right + b"!", "shorter": right[:-1]}[change]
    hub.served[("a" * 40, name)] = wrong
    with pytest.raises(ModelFileError, match=name):
        pull("hf:owner/name")
    assert all(kept.problem for kept in cached_models())
    hub.served.clear()
    assert (pull("hf:owner/name") / name).read_bytes() == right


def test_too_little_disk_space_is_an_error_before_the_first_byte(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = cache.shutil.disk_usage(".")
    monkeypatch.setattr(cache.shutil, "disk_usage", lambda path: usage._replace(free=3 << 20))
    with pytest.raises(ModelFileError, match="the download needs 4 MiB and 3 MiB are free"):
        pull("hf:owner/name")
    assert hub.downloads() == []


# --- errors of the hub ------------------------------------------------------------------------------------------


def test_the_error_for_a_gated_model_names_the_terms_and_a_token_gives_access(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.gated, hub.token = True, "hf_secret"
    with pytest.raises(
        ModelFileError, match=r"gated: accept its terms at http://.*/owner/name, then set HF_TOKEN"
    ):
        pull("hf:owner/name")
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    with pytest.raises(ModelFileError, match="the token that was sent has no access yet"):
        pull("hf:owner/name")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert (pull("hf:owner/name") / "model.safetensors").read_bytes() == WEIGHTS


@pytest.mark.parametrize("redirects_only_get", [False, True])
def test_the_token_is_sent_to_the_hub_and_not_to_its_storage_host(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, redirects_only_get: bool
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    hub.redirects_only_get = redirects_only_get
    hub.storage = hub.url.replace("127.0.0.1", "localhost")
    assert (pull("hf:owner/name") / "model.safetensors").read_bytes() == WEIGHTS
    assert hub.tokens_at_storage == [None] * 3


def test_the_error_names_a_repository_or_revision_that_the_hub_does_not_have(hub: Hub) -> None:
    with pytest.raises(ModelFileError, match=r"hf:owner/other: there is no such model .* private"):
        pull("hf:owner/other")
    with pytest.raises(ModelFileError, match="no revision 'v9'"):
        pull("hf:owner/name@v9")


def test_an_unreachable_hub_is_an_error_of_one_line_and_exit_code_2(hub: Hub) -> None:
    run = run_pull("hf:owner/name", HF_ENDPOINT="http://127.0.0.1:9")
    assert run.returncode == 2 and run.stdout == ""
    assert run.stderr.count("\n") == 1
    assert "http://127.0.0.1:9 cannot be reached" in run.stderr


def test_offline_mode_uses_cached_models_and_refuses_others(hub: Hub) -> None:
    run = run_pull("hf:owner/name", HF_HUB_OFFLINE="1")
    assert run.returncode == 2 and "HF_HUB_OFFLINE" in run.stderr
    folder = pull("hf:owner/name")
    run = run_pull("hf:owner/name", HF_HUB_OFFLINE="1")
    assert run.returncode == 0 and run.stdout.strip() == str(folder)


# --- names and removal ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("hf:a/b", HubModel("a/b")),
        ("hf:a/b-2.5@refs/pr/1", HubModel("a/b-2.5", "refs/pr/1")),
        ("hf:a/b:Q4_K_M", HubModel("a/b", quantisation="Q4_K_M")),
        ("hf:a/b/sub/c.gguf@v1", HubModel("a/b", "v1", "sub/c.gguf")),
    ],
)
def test_a_parsed_model_name_prints_as_it_was_written(name: str, model: HubModel) -> None:
    assert parse_hub_name(name) == model
    assert str(model) == name


@pytest.mark.parametrize(
    "name",
    [
        "hf:",
        "hf:gpt2",
        "hf:a/b/c",
        "hf:a/b@",
        "hf:../b",
        "hf:a/../../x.gguf",
        "hf:a/b/../../x.gguf",
        "hf:a/b:",
    ],
)
def test_an_invalid_model_name_is_refused_with_the_allowed_forms(name: str) -> None:
    with pytest.raises(ModelFileError, match="hf:OWNER/NAME"):
        parse_hub_name(name)


def test_a_removed_model_leaves_no_files(hub: Hub) -> None:
    pull("hf:owner/name")
    assert remove("hf:owner/name") == sum(
        len(FILES[n]) for n in ("config.json", "tokenizer.json", "model.safetensors")
    )
    assert cached_models() == []
    assert [path for path in (models_directory() / "hub").rglob("*") if not path.name.endswith(".lock")] == []
    with pytest.raises(ModelFileError, match="is not in the cache; cached models: none"):
        remove("hf:owner/name")


def test_an_incomplete_download_can_only_be_removed_by_its_name(hub: Hub) -> None:
    partial = models_directory() / "hub" / "owner--name" / ("a" * 40) / ".partial-m.Q4_0.gguf"
    partial.parent.mkdir(parents=True)
    partial.write_bytes(b"begun")
    with pytest.raises(ModelFileError, match="is not in the cache; cached models: hf:owner/name"):
        remove("hf:owner/name:Q8_0")
    assert partial.read_bytes() == b"begun"
    assert remove("hf:owner/name") == 5
    assert cached_models() == [] and not partial.exists()


def test_a_model_is_not_removed_during_a_pull_from_its_repository(hub: Hub) -> None:
    gguf_repository(hub, "m.Q4_0.gguf", "m.Q8_0.gguf")
    pull("hf:owner/name:Q8_0")
    hub.hang_after = 1_000
    waiting = threading.Event()
    command = [sys.executable, "-m", "weft.cli.main", "pull", "hf:owner/name:Q4_0"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL) as process:
        assert hub.hanging.wait(120)
        partial = models_directory() / "hub" / "owner--name" / ("a" * 40) / ".partial-m.Q4_0.gguf"
        while not partial.exists():  # the pulling process may not have received the bytes yet
            assert process.poll() is None
        removal = threading.Thread(target=remove, args=("hf:owner/name:Q8_0", lambda _: waiting.set()))
        removal.start()
        assert waiting.wait(120)
        assert partial.exists() and [kept.name for kept in cached_models()] == ["hf:owner/name:Q8_0"]
        process.send_signal(signal.SIGKILL)
    removal.join()
    assert "hf:owner/name:Q8_0" not in {kept.name for kept in cached_models()}


def test_an_invalid_manifest_is_ignored(hub: Hub, tmp_path: Path) -> None:
    pull("hf:owner/name")
    (manifest,) = (models_directory() / "hub").glob("*.json")
    content = json.loads(manifest.read_text())
    content["files"][0]["name"] = "../../../../config.json"
    for tampered in (json.dumps(content), "{"):
        manifest.write_text(tampered)
        problems = [kept.problem for kept in cached_models()]
        assert problems == ["the download is incomplete; pull it again to resume"]
    assert (pull("hf:owner/name") / "config.json").read_bytes() == FILES["config.json"]
