"""Batches of a real server: killed at random points, stopped, out of disk, and used through the openai package."""

from __future__ import annotations

import json
import random
import resource
import signal
import socket
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from batch_client import COMPLETIONS, line, lines
from server_process import NOOP, Server, running_server, wait_for

ENDED = ("completed", "failed", "expired", "cancelled")


@pytest.fixture(scope="module")
def batch_server(default_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("state")
    with running_server(default_model_path, state_path=str(folder)) as server:
        yield server


def upload(server: Server, content: bytes, purpose: str = "batch") -> httpx.Response:
    return server.client.post("/v1/files", data={"purpose": purpose}, files={"file": ("a.jsonl", content)})


def submit(server: Server, content: bytes, endpoint: str = COMPLETIONS) -> str:
    body = {"input_file_id": upload(server, content).json()["id"], "endpoint": endpoint}
    batch_id: str = server.client.post("/v1/batches", json=body).json()["id"]
    return batch_id


def described(server: Server, batch_id: str) -> dict[str, Any]:
    found: dict[str, Any] = server.client.get(f"/v1/batches/{batch_id}").json()
    return found


def results(server: Server, file_id: str) -> list[bytes]:
    return server.client.get(f"/v1/files/{file_id}/content").content.splitlines()


def has_progress(server: Server, batch_id: str, num_lines: int) -> bool:
    """Whether so many lines have a result, or the batch has ended."""
    batch = described(server, batch_id)
    return batch["status"] in ENDED or batch["request_counts"]["completed"] >= num_lines


def test_after_kill_9_no_line_is_lost_and_none_with_a_result_runs_again(
    default_model_path: Path, tmp_path: Path
) -> None:
    chance, num_lines = random.Random(5), 500
    options = {**NOOP, "seconds_per_step": 0.01}
    settings = {"state_path": str(tmp_path), "backend_options": options}
    settings["engine"] = {"scheduler": {"max_running": 16}}
    known: dict[int, bytes] = {}
    num_saved: list[int] = []
    batch_id, goals = "", [0, *sorted(chance.sample(range(1, num_lines), 3))]
    for goal in goals:
        with running_server(default_model_path, **settings) as server:
            batch_id = batch_id or submit(server, lines(map(line, range(num_lines))))
            wait_for(partial(has_progress, server, batch_id, goal))
            time.sleep(chance.random() * 0.05)
            server.process.send_signal(signal.SIGKILL)
            server.process.wait()
        with closing(sqlite3.connect(tmp_path / "state.db")) as connection:
            saved = dict(connection.execute("SELECT line, result FROM batch_lines").fetchall())
        assert known.items() <= saved.items(), "a result was lost or written again"
        assert len(saved) >= goal
        known = saved
        num_saved.append(len(saved))
    with running_server(default_model_path, **settings) as server:
        wait_for(partial(has_progress, server, batch_id, 10**9))
        batch = described(server, batch_id)
        found = results(server, batch["output_file_id"])
    assert any(0 < count < num_lines for count in num_saved), "no server was killed in the middle"
    assert batch["status"] == "completed"
    assert batch["request_counts"] == {"total": num_lines, "completed": num_lines, "failed": 0}
    assert len(found) == num_lines and all(found[index] == known[index] for index in known)
    for index, raw in enumerate(found):
        one = json.loads(raw)
        assert one["custom_id"] == f"id-{index}"
        assert one["response"]["body"]["usage"]["completion_tokens"] == index % 7 + 1


def test_a_server_that_stops_continues_its_batch_after_the_restart(
    default_model_path: Path, tmp_path: Path
) -> None:
    options = {**NOOP, "seconds_per_step": 0.05}
    long = {"prompt": "a", "max_tokens": 4000, "ignore_eos": True}
    content = lines([line(0), line(1, body=long)])
    with running_server(default_model_path, state_path=str(tmp_path), backend_options=options) as server:
        batch_id = submit(server, content)
        wait_for(lambda: described(server, batch_id)["request_counts"]["completed"] == 1)
        began = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(60)
        assert time.monotonic() - began < 25  # drain_seconds is 30: it did not wait for the line
    with running_server(default_model_path, state_path=str(tmp_path)) as server:
        wait_for(lambda: described(server, batch_id)["status"] == "completed")
        batch = described(server, batch_id)
        assert batch["request_counts"] == {"total": 2, "completed": 2, "failed": 0}


def test_the_openai_package_uploads_runs_and_downloads_in_strict_types(batch_server: Server) -> None:
    with openai.OpenAI(
        base_url=f"{batch_server.url}/v1", api_key="none", max_retries=0, _strict_response_validation=True
    ) as client:
        content = lines(map(line, range(20)))
        file = client.files.create(
            file=("lines.jsonl", content),
            purpose="batch",
            expires_after={"anchor": "created_at", "seconds": 7200},
        )
        assert file.bytes == len(content) and file.expires_at == file.created_at + 7200
        assert client.files.retrieve(file.id) == file
        batch = client.batches.create(
            input_file_id=file.id,
            endpoint="/v1/completions",
            completion_window="24h",
            metadata={"a": "b"},
            output_expires_after={"anchor": "created_at", "seconds": 3600},
        )
        wait_for(lambda: client.batches.retrieve(batch.id).status == "completed")
        ended = client.batches.retrieve(batch.id)
        assert ended.request_counts is not None and ended.request_counts.completed == 20
        assert ended.output_file_id is not None and ended.metadata == {"a": "b"}
        found = client.files.content(ended.output_file_id).text.splitlines()
        assert [json.loads(one)["custom_id"] for one in found] == [f"id-{index}" for index in range(20)]
        assert batch.id in [one.id for one in client.batches.list(limit=1)]
        names = [one.filename for one in client.files.list(purpose="batch_output")]
        assert f"{batch.id}_output.jsonl" in names
        assert client.files.delete(ended.output_file_id).deleted
        with pytest.raises(openai.NotFoundError):
            client.files.retrieve(ended.output_file_id)
        with pytest.raises(openai.ConflictError):
            client.batches.cancel(batch.id)


def test_a_client_that_disconnects_while_it_uploads_leaves_nothing(
    default_model_path: Path, tmp_path: Path
) -> None:
    with running_server(default_model_path, state_path=str(tmp_path)) as server:
        request = httpx.Request(
            "POST", f"{server.url}/v1/files", data={"purpose": "batch"}, files={"file": b"a" * (4 << 20)}
        )
        body = request.read()
        head = f"POST /v1/files HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: {request.headers['content-type']}\r\n"
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body[: 3 << 20])
            wait_for(lambda: list((tmp_path / "files").glob(".new-*")))
        wait_for(lambda: not list((tmp_path / "files").iterdir()))
        assert server.client.get("/v1/files").json()["data"] == []


LONG = {"ignore_eos": True}


def num_failed(server: Server, status: int) -> float:
    """The number of requests that ended with this status."""
    found = [one for one in server.client.get("/metrics").text.splitlines() if f'status="{status}"' in one]
    return sum(float(one.split()[-1]) for one in found if one.startswith("weft:request_failure_total{"))


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        (COMPLETIONS, {"prompt": "a", "max_tokens": 300, **LONG}),
        ("/v1/responses", {"input": "a", "max_output_tokens": 300, "store": True, **LONG}),
    ],
)
def test_a_full_disk_refuses_uploads_and_pauses_a_batch_and_nothing_is_lost(
    default_model_path: Path, tmp_path: Path, endpoint: str, body: dict[str, Any]
) -> None:
    """A limit for the size of files stands for a full disk."""
    with running_server(default_model_path, state_path=str(tmp_path)) as server:
        pid = server.process.pid
        content = lines(line(index, url=endpoint, body=body) for index in range(300))
        batch_id = submit(server, content, endpoint)
        _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (300_000, hard))
        refused = upload(server, b"a" * (2 << 20))
        assert refused.status_code == 507 and "disk is full" in refused.json()["error"]["message"]
        assert not list((tmp_path / "files").glob(".new-*"))
        assert server.complete().status_code == 200
        if endpoint == COMPLETIONS:
            time.sleep(0.5)
        else:  # the answers themselves cannot be stored
            wait_for(lambda: num_failed(server, 507) > 1)  # one is that of the upload
        assert described(server, batch_id)["status"] in ("validating", "in_progress", "finalizing")
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard, hard))
        wait_for(lambda: described(server, batch_id)["status"] in ENDED)
        batch = described(server, batch_id)
        assert batch["request_counts"] == {"total": 300, "completed": 300, "failed": 0}
        found = [
            json.loads(one)["response"]["body"]["id"] for one in results(server, batch["output_file_id"])
        ]
        assert len(set(found)) == 300
        if endpoint != COMPLETIONS:
            assert all(server.client.get(f"{endpoint}/{one}").status_code == 200 for one in found[::30])


def peak(server: Server) -> int:
    """The most memory that the server process has had, in bytes."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) << 10


def test_a_large_upload_does_not_stay_in_memory(batch_server: Server) -> None:
    upload(batch_server, b"a", "user_data")
    before = peak(batch_server)
    content = bytes(64 << 20)
    assert upload(batch_server, content, "user_data").json()["bytes"] == len(content)
    assert peak(batch_server) - before < 16 << 20


def test_a_large_batch_file_is_validated_in_bounded_memory(default_model_path: Path, tmp_path: Path) -> None:
    """All lines but one are wrong: validating is what takes time, and the error file has a line for each."""
    wrong = b"".join(
        b'{"custom_id": "%d", "url": "/v1/nothing", "body": {"user": "%s"}}\n' % (index, b"x" * 1600)
        for index in range(20_000)
    )
    with running_server(default_model_path, state_path=str(tmp_path)) as server:
        upload(server, b"a", "user_data")
        before = peak(server)
        batch_id = submit(server, wrong + lines([line(0)]))
        wait_for(lambda: described(server, batch_id)["status"] in ENDED)
        assert peak(server) - before < 16 << 20 < len(wrong)
        batch = described(server, batch_id)
        assert batch["request_counts"] == {"total": 20_001, "completed": 1, "failed": 20_000}
        assert len(batch["errors"]["data"]) == 100
        assert len(results(server, batch["error_file_id"])) == 20_000
