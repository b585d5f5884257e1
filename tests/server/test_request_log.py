"""The log of a real server: lines for requests and events, and the ids that connect responses to lines."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_process import MESSAGES, SLOW, Server, api_key, running_server, wait_for

SECRET = "do not write this down"
KEY = "sk-secret"


@pytest.fixture(scope="module")
def logged(
    default_model_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Server, Path]]:
    path = tmp_path_factory.mktemp("log") / "log"
    headers = {"Authorization": f"Bearer {KEY}"}
    with (
        path.open("w") as stream,
        running_server(
            default_model_path,
            backend_options=SLOW,
            log_format="json",
            api_keys=[api_key(KEY, name="team")],
            headers=headers,
            stderr=stream,
        ) as server,
    ):
        yield server, path


Found = Callable[[str], dict[str, Any]]


@pytest.fixture
def found(logged: tuple[Server, Path]) -> Found:
    """Waits for the log line of the request with this id."""

    def line(request_id: str) -> dict[str, Any]:
        lines: list[dict[str, Any]] = []

        def is_there() -> bool:
            lines[:] = [one for one in lines_of(logged[1]) if one.get("request_id") == request_id]
            return bool(lines)

        wait_for(is_there)
        assert len(lines) == 1
        return lines[0]

    return line


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]


def test_a_response_and_its_log_line_have_the_same_id(logged: tuple[Server, Path], found: Found) -> None:
    server, _ = logged
    response = server.chat(messages=[{"role": "user", "content": SECRET}], n=2, ignore_eos=True)
    request_id = response.headers["x-request-id"]
    assert response.json()["id"].endswith(request_id)
    line, usage = found(request_id), response.json()["usage"]
    assert (line["status"], line["route"], line["method"]) == (200, "/v1/chat/completions", "POST")
    assert line["prompt_tokens"] == usage["prompt_tokens"] and line["completion_tokens"] == 8
    assert line["finish_reasons"] == ["length", "length"] and "stream" not in line
    assert line["key"] == "team"
    assert 0 <= line["queue_seconds"] <= line["first_token_seconds"] <= line["total_seconds"]


def test_the_engine_knows_a_request_by_the_id_in_its_response(
    default_model_path: Path, tmp_path: Path
) -> None:
    path, log = tmp_path / "events", tmp_path / "log"
    with (
        log.open("w") as stream,
        running_server(
            default_model_path, log_format="json", engine={"log_path": str(path)}, stderr=stream
        ) as server,
    ):
        one = server.complete(prompt="x", max_tokens=1)
        body = {"prompt": ["x", "y"], "n": 2, "max_tokens": 1}
        several = server.client.post("/v1/completions", json=body, headers={"x-request-id": "mine"})
        assert several.headers["x-request-id"] == "mine"
        ids = [answer.json()["id"].removeprefix("cmpl-") for answer in (one, several)]
        wait_for(lambda: sum("request_id" in line for line in lines_of(log)) == 2)
    events = [json.loads(line) for line in path.read_text().splitlines()]
    added = [one["request"]["request_id"] for event in events for one in event.get("requests", ())]
    assert added == [ids[0], *(f"{ids[1]}-{prompt}-{answer}" for prompt in (0, 1) for answer in (0, 1))]
    lines = {line["request_id"]: line for line in lines_of(log) if "request_id" in line}
    assert lines["mine"]["id"] == ids[1] and "id" not in lines[ids[0]]


def test_a_stream_is_logged_too(logged: tuple[Server, Path], found: Found) -> None:
    server, _ = logged
    response = server.complete(stream=True, ignore_eos=True)
    line = found(response.headers["x-request-id"])
    assert line["stream"] is True and line["completion_tokens"] == 4 and line["status"] == 200


@pytest.mark.parametrize(
    ("path", "fields", "headers", "status", "code"),
    [
        ("/v1/completions", {"prompt": SECRET, "n": 0}, {}, 400, "invalid_value"),
        ("/v1/completions", {"prompt": "x", "model": "y"}, {}, 404, "model_not_found"),
        ("/v1/completions", {"prompt": "x"}, {"Authorization": "Bearer wrong"}, 401, "invalid_api_key"),
        ("/v1/completions", {"prompt": "x"}, {"Host": "evil.example"}, 403, "forbidden_host"),
        ("/nowhere", {}, {}, 404, None),
        ("/health", {}, {}, 405, None),
    ],
)
def test_every_error_has_the_id_that_the_client_sent_and_is_logged(
    logged: tuple[Server, Path],
    found: Found,
    path: str,
    fields: Any,
    headers: Any,
    status: int,
    code: str | None,
) -> None:
    server, _ = logged
    request_id = f"mine-{status}-{path[1:]}"
    response = server.client.post(path, json=fields, headers={"x-request-id": request_id, **headers})
    assert response.status_code == status and response.headers["x-request-id"] == request_id
    line = found(request_id)
    assert line["status"] == status and line.get("error_code") == code


def test_a_disconnect_is_logged(logged: tuple[Server, Path], found: Found) -> None:
    server, _ = logged
    headers = {"x-request-id": "gone", "Authorization": f"Bearer {KEY}"}
    body = {"prompt": [1], "max_tokens": 8000, "ignore_eos": True, "stream": True}
    url = f"{server.url}/v1/completions"
    with httpx.stream("POST", url, json=body, headers=headers, timeout=60) as response:
        next(response.iter_lines())
    assert found("gone")["client_gone"] is True
    server.wait_until_free()


def test_probes_are_not_logged_and_no_prompt_answer_or_key_is_ever_logged(
    logged: tuple[Server, Path], found: Found
) -> None:
    server, path = logged
    for quiet in ("/health", "/metrics", "/ready"):
        assert server.client.get(quiet).headers["x-request-id"]
    answer = server.chat(messages=[*MESSAGES, {"role": "user", "content": SECRET}], max_tokens=8)
    found(answer.headers["x-request-id"])
    content = path.read_text()
    assert '"/metrics"' not in content and '"route":"/health","status":200' not in content
    for secret in (SECRET, KEY, "wrong", answer.json()["choices"][0]["message"]["content"]):
        assert secret not in content


def test_the_events_of_a_server_are_logged_in_order(default_model_path: Path, tmp_path: Path) -> None:
    path = tmp_path / "log"
    with (
        path.open("w") as stream,
        running_server(default_model_path, log_format="json", stderr=stream) as server,
    ):
        os.kill(server.engine_pid(), signal.SIGKILL)
        wait_for(lambda: "engine_restarted" in path.read_text())
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
    events = [line["event"] for line in lines_of(path)]
    assert events == ["engine_died", "engine_restarted", "draining", "stopped"]


@pytest.mark.parametrize(
    "sent", [b"\x16\x03\x01\x02\x00", b"GET / HTTP/9\r\n\r\n", b"GET /health HTTP/1.1\r\nX: a\x00\r\n\r\n"]
)
def test_bytes_that_are_not_http_get_an_error_in_the_format_of_the_api(server: Server, sent: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(sent + b"\r\n\r\n")
        received = b""
        while part := connection.recv(65536):
            received += part
    head, _, body = received.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 Bad Request") and b"x-request-id: " in head
    assert json.loads(body)["error"]["code"] == "invalid_http"
