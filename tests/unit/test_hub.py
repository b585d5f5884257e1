"""Pulling from the hub: the real client and a small server of our own that speaks as much of the hub as it asks for."""

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
"""Files from this size on are kept as LFS files, known by their SHA-256; smaller ones by git's checksum."""


class Hub(ThreadingHTTPServer):
    """A hub on this machine with one repository. `commits` maps a commit to its files; `revisions` names commits."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.commits: dict[str, dict[str, bytes]] = {"a" * 40: dict(FILES)}
        self.revisions = {"main": "a" * 40}
        self.served: dict[tuple[str, str], bytes] = {}
        """What comes instead of the right content."""
        self.gated = False
        self.token: str | None = None
        self.ranges = True
        self.storage: str | None = None
        """Another host that the content of files really comes from."""
        self.names_storage_late = False
        """Only when the content is asked for, as an endpoint that is a mirror may do."""
        self.tokens_at_storage: list[str | None] = []
        self.stop_after: int | None = None
        """Each answer breaks off after so many bytes."""
        self.hang_after: int | None = None
        self.hanging = threading.Event()
        self.asked: list[tuple[str, str, str | None]] = []
        self.bytes_sent = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def downloads(self) -> list[tuple[str, str | None]]:
        return [
            (path.rpartition("/")[2], span)
            for method, path, span in self.asked
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
        self.server.asked.append((self.command, path, self.headers.get("Range")))
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
        is_late = self.command == "HEAD" and self.server.names_storage_late
        if self.server.storage and self.headers["Host"] not in self.server.storage and not is_late:
            headers = {"Location": self.server.storage + self.path, "X-Repo-Commit": commit}
            headers |= {"X-Linked-ETag": f'"{git_digest(content)}"', "X-Linked-Size": str(len(content))}
            return self._answer(302, b"", headers)
        if not is_late:
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
    # For the processes that tests start, and for this one, where huggingface_hub has read its environment already.
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


# --- what is fetched --------------------------------------------------------------------------------------------


def test_a_pulled_model_is_its_safetensors_and_descriptions_and_never_code_or_pickles(hub: Hub) -> None:
    events: list[PullProgress] = []
    folder = pull("hf:owner/name", events.append)
    names = ("config.json", "tokenizer.json", "model.safetensors")
    assert contents(folder) == {name: FILES[name] for name in names}
    total = sum(len(FILES[name]) for name in names)
    assert events[-1] == PullProgress("download", total, total)
    done = [event.done_bytes for event in events if event.stage == "download"]
    assert done == sorted(done)


def test_a_pulled_model_needs_no_hub_afterwards(hub: Hub) -> None:
    folder = pull("hf:owner/name")
    hub.shutdown()
    asked = len(hub.asked)
    events: list[PullProgress] = []
    assert pull("hf:owner/name", events.append) == folder
    assert events == [] and len(hub.asked) == asked


def test_a_second_pull_downloads_nothing_and_finds_damage(hub: Hub) -> None:
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


def test_a_revision_that_moved_is_fetched_anew_by_what_changed_in_it(hub: Hub) -> None:
    old = pull("hf:owner/name")
    hub.commits["b" * 40] = {**FILES, "config.json": b'{"model_type": "qwen2"}'}
    hub.revisions["main"] = "b" * 40
    assert pull("hf:owner/name") == old, "only asking for it looks for something newer"
    hub.asked.clear()
    new = pull("hf:owner/name", verify=True)
    assert [name for name, _ in hub.downloads()] == ["config.json"]
    assert (new / "config.json").read_bytes() == b'{"model_type": "qwen2"}'
    assert (new / "model.safetensors").read_bytes() == WEIGHTS
    assert not old.exists()


def test_two_revisions_live_side_by_side(hub: Hub) -> None:
    hub.commits["b" * 40] = {**FILES, "config.json": b"{}"}
    hub.revisions["v2"] = "b" * 40
    first, second = pull("hf:owner/name"), pull("hf:owner/name@v2")
    assert first != second and first.exists() and second.exists()
    assert [kept.name for kept in cached_models()] == ["hf:owner/name", "hf:owner/name@v2"]
    remove("hf:owner/name@v2")
    assert first.exists() and not second.exists()


def test_files_in_the_hubs_own_cache_are_used(hub: Hub) -> None:
    huggingface_hub.hf_hub_download("owner/name", "model.safetensors")
    hub.asked.clear()
    folder = pull("hf:owner/name")
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert [name for name, _ in hub.downloads()] == ["config.json", "tokenizer.json"]


def test_a_gguf_file_is_chosen_by_itself_by_its_name_or_by_its_quantisation(hub: Hub) -> None:
    gguf_repository(hub, "m.Q4_K_M.gguf", "m.Q4_K_S.gguf", "sub/m-q8_0.gguf", "mmproj-m.gguf")
    assert pull("hf:owner/name/sub/m-q8_0.gguf").read_bytes() == b"sub/m-q8_0.gguf" * 500
    assert pull("hf:owner/name:Q8_0").name == "m-q8_0.gguf"
    assert pull("hf:owner/name:Q4_K_M").name == "m.Q4_K_M.gguf"
    with pytest.raises(ModelFileError, match=r"has 3 GGUF models; name one: hf:owner/name/m\.Q4_K_M\.gguf, "):
        pull("hf:owner/name")
    with pytest.raises(ModelFileError, match=r"has 3 GGUF models; none of them is Q4_K; name one"):
        pull("hf:owner/name:Q4_K")
    gguf_repository(hub, "only.gguf")
    assert pull("hf:owner/name").name == "only.gguf"


def test_a_gguf_model_of_several_files_is_fetched_as_one(hub: Hub) -> None:
    parts = [f"big/m-Q8_0-{number:05}-of-00003.gguf" for number in (1, 2, 3)]
    gguf_repository(hub, *parts)
    first = models_directory() / "hub" / "owner--name" / ("a" * 40) / parts[0]
    for name in ("hf:owner/name", "hf:owner/name:Q8_0", f"hf:owner/name/{parts[0]}"):
        assert pull(name) == first
        assert sorted(contents(first.parent)) == [Path(part).name for part in parts]
    with pytest.raises(
        ModelFileError, match=r"none of them is .*-00002-.*; name one: hf:.*-00001-of-00003\.gguf$"
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
        ({"README.md": b"x"}, "neither safetensors beside a config.json nor a GGUF file"),
        ({"m-00001-of-00002.gguf": b"x"}, "m-00002-of-00002.gguf is missing: .* 1 of the 2 files"),
        ({"../../escape.gguf": b"x"}, "neither safetensors"),
    ],
)
def test_a_repository_without_a_readable_model_says_why(
    hub: Hub, files: dict[str, bytes], message: str
) -> None:
    hub.commits["a" * 40] = files
    with pytest.raises(ModelFileError, match=message):
        pull("hf:owner/name")
    assert cached_models() == []


# --- transfers that go wrong ------------------------------------------------------------------------------------


def test_a_killed_pull_leaves_no_model_and_the_next_one_goes_on_where_it_stopped(hub: Hub) -> None:
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
    here = partial.stat().st_size
    (begun,) = cached_models()
    assert begun.name == "hf:owner/name" and begun.problem and "not all of it came" in begun.problem
    assert begun.size > here and not (folder / "model.safetensors").exists()
    hub.hang_after = None
    hub.asked.clear()
    assert (pull("hf:owner/name") / "model.safetensors").read_bytes() == WEIGHTS
    assert hub.downloads() == [("model.safetensors", f"bytes={here}-")], (
        "and the small files are not fetched again"
    )
    assert not partial.exists()


def test_a_connection_that_keeps_breaking_is_taken_up_again_as_long_as_bytes_come(hub: Hub) -> None:
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


def test_a_beginning_that_does_not_fit_the_rest_is_thrown_away(hub: Hub) -> None:
    folder = models_directory() / "hub" / "owner--name" / ("a" * 40)
    folder.mkdir(parents=True)
    (folder / ".partial-model.safetensors").write_bytes(b"!" * 1000)
    assert (pull("hf:owner/name") / "model.safetensors").read_bytes() == WEIGHTS


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
@pytest.mark.parametrize("change", ["flipped", "longer", "shorter"])
def test_another_content_than_the_hub_announced_is_refused_and_not_kept(
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


def test_a_disk_without_room_is_told_before_the_first_byte(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = cache.shutil.disk_usage(".")
    monkeypatch.setattr(cache.shutil, "disk_usage", lambda path: usage._replace(free=3 << 20))
    with pytest.raises(ModelFileError, match="4 MiB are needed to fetch the model and 3 MiB are free"):
        pull("hf:owner/name")
    assert hub.downloads() == []


# --- refusals ---------------------------------------------------------------------------------------------------


def test_a_gated_model_says_where_to_agree_and_a_token_opens_it(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.gated, hub.token = True, "hf_secret"
    with pytest.raises(
        ModelFileError, match=r"gated: accept its terms at http://.*/owner/name, then set HF_TOKEN"
    ):
        pull("hf:owner/name")
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    with pytest.raises(ModelFileError, match="the token that was sent has none"):
        pull("hf:owner/name")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert (pull("hf:owner/name") / "model.safetensors").read_bytes() == WEIGHTS


@pytest.mark.parametrize("late", [False, True])
def test_the_token_goes_to_the_hub_and_not_to_the_storage_behind_it(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    hub.names_storage_late = late
    hub.storage = hub.url.replace("127.0.0.1", "localhost")
    assert (pull("hf:owner/name") / "model.safetensors").read_bytes() == WEIGHTS
    assert hub.tokens_at_storage == [None] * 3


def test_what_the_hub_does_not_have_is_named(hub: Hub) -> None:
    with pytest.raises(ModelFileError, match=r"hf:owner/other: there is no such model .* private"):
        pull("hf:owner/other")
    with pytest.raises(ModelFileError, match="no revision 'v9'"):
        pull("hf:owner/name@v9")


def test_a_hub_that_cannot_be_reached_is_an_error_of_one_line_and_exit_code_2(hub: Hub) -> None:
    run = run_pull("hf:owner/name", HF_ENDPOINT="http://127.0.0.1:9")
    assert run.returncode == 2 and run.stdout == ""
    assert run.stderr.count("\n") == 1
    assert "http://127.0.0.1:9 cannot be reached" in run.stderr


def test_offline_mode_uses_what_is_here_and_says_what_is_not(hub: Hub) -> None:
    run = run_pull("hf:owner/name", HF_HUB_OFFLINE="1")
    assert run.returncode == 2 and "HF_HUB_OFFLINE" in run.stderr
    folder = pull("hf:owner/name")
    run = run_pull("hf:owner/name", HF_HUB_OFFLINE="1")
    assert run.returncode == 0 and run.stdout.strip() == str(folder)


# --- names and housekeeping -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("hf:a/b", HubModel("a/b")),
        ("hf:a/b-2.5@refs/pr/1", HubModel("a/b-2.5", "refs/pr/1")),
        ("hf:a/b:Q4_K_M", HubModel("a/b", quantisation="Q4_K_M")),
        ("hf:a/b/sub/c.gguf@v1", HubModel("a/b", "v1", "sub/c.gguf")),
    ],
)
def test_the_name_of_a_model_is_read_and_written_the_same_way(name: str, model: HubModel) -> None:
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
def test_what_is_no_name_is_refused_with_the_forms_that_are(name: str) -> None:
    with pytest.raises(ModelFileError, match="hf:OWNER/NAME"):
        parse_hub_name(name)


def test_a_removed_model_leaves_nothing_behind(hub: Hub) -> None:
    pull("hf:owner/name")
    assert remove("hf:owner/name") == sum(
        len(FILES[n]) for n in ("config.json", "tokenizer.json", "model.safetensors")
    )
    assert cached_models() == []
    assert [path for path in (models_directory() / "hub").rglob("*") if not path.name.endswith(".lock")] == []
    with pytest.raises(ModelFileError, match="is not in the cache; what is there: none"):
        remove("hf:owner/name")


def test_what_was_begun_can_be_removed_by_its_name_and_by_no_other(hub: Hub) -> None:
    partial = models_directory() / "hub" / "owner--name" / ("a" * 40) / ".partial-m.Q4_0.gguf"
    partial.parent.mkdir(parents=True)
    partial.write_bytes(b"begun")
    with pytest.raises(ModelFileError, match="is not in the cache; what is there: hf:owner/name"):
        remove("hf:owner/name:Q8_0")
    assert partial.read_bytes() == b"begun"
    assert remove("hf:owner/name") == 5
    assert cached_models() == [] and not partial.exists()


def test_a_model_is_not_removed_while_somebody_pulls_from_its_repository(hub: Hub) -> None:
    gguf_repository(hub, "m.Q4_0.gguf", "m.Q8_0.gguf")
    pull("hf:owner/name:Q8_0")
    hub.hang_after = 1_000
    waiting = threading.Event()
    command = [sys.executable, "-m", "weft.cli.main", "pull", "hf:owner/name:Q4_0"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL) as process:
        assert hub.hanging.wait(120)
        partial = models_directory() / "hub" / "owner--name" / ("a" * 40) / ".partial-m.Q4_0.gguf"
        while not partial.exists():  # what was sent may not have arrived
            assert process.poll() is None
        removal = threading.Thread(target=remove, args=("hf:owner/name:Q8_0", lambda _: waiting.set()))
        removal.start()
        assert waiting.wait(120)
        assert partial.exists() and [kept.name for kept in cached_models()] == ["hf:owner/name:Q8_0"]
        process.send_signal(signal.SIGKILL)
    removal.join()
    assert "hf:owner/name:Q8_0" not in {kept.name for kept in cached_models()}


def test_a_manifest_that_was_tampered_with_is_no_model(hub: Hub, tmp_path: Path) -> None:
    pull("hf:owner/name")
    (manifest,) = (models_directory() / "hub").glob("*.json")
    content = json.loads(manifest.read_text())
    content["files"][0]["name"] = "../../../../config.json"
    for tampered in (json.dumps(content), "{"):
        manifest.write_text(tampered)
        assert [kept.problem for kept in cached_models()] == ["not all of it came; pull it again to go on"]
    assert (pull("hf:owner/name") / "config.json").read_bytes() == FILES["config.json"]
