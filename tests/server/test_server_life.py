"""Disconnects, a dead engine, signals: the server releases its resources, and continues or ends."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_process import MODEL, SLOW, SOURCE, Server, api_key, running_server, wait_for

LONG: dict[str, Any] = {"prompt": "x", "max_tokens": 8000, "ignore_eos": True}


@pytest.fixture(scope="module")
def slow_server(default_model_path: Path) -> Iterator[Server]:
    """A slow server that runs one sequence at a time, so that other requests wait."""
    engine = {"scheduler": {"max_running": 1, "max_waiting_requests": 2, "max_chunk_tokens": 16}}
    with running_server(default_model_path, backend_options=SLOW, engine=engine) as server:
        yield server


def send_request(
    server: Server, receive_buffer: int | None = None, key: str = "", **fields: Any
) -> socket.socket:
    """Sends a request on a new connection that the test can close."""
    body = json.dumps(
        {"prompt": "Once upon a time", "max_tokens": 8000, "ignore_eos": True, **fields}
    ).encode()
    connection = socket.socket()
    connection.settimeout(60)
    if receive_buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.connect(("127.0.0.1", server.port))
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
        f"Authorization: Bearer {key}\r\n\r\n"
    )
    connection.sendall(head.encode() + body)
    return connection


@pytest.mark.parametrize("stream", [True, False])
def test_38_a_disconnect_during_decode_frees_the_memory(slow_server: Server, stream: bool) -> None:
    connection = send_request(slow_server, stream=stream)
    wait_for(lambda: slow_server.metric("kv_cache_usage_perc") > 0)
    connection.close()
    slow_server.wait_until_free()


@pytest.mark.parametrize("stream", [True, False])
def test_38_a_disconnect_in_the_queue_removes_the_request(slow_server: Server, stream: bool) -> None:
    running = send_request(slow_server, stream=True)
    wait_for(lambda: slow_server.metric("num_requests_running") == 1)
    queued = send_request(slow_server, stream=stream)
    wait_for(lambda: slow_server.metric("num_requests_waiting") == 1)
    queued.close()
    wait_for(lambda: slow_server.metric("num_requests_waiting") == 0)
    assert slow_server.metric("num_requests_running") == 1
    running.close()
    slow_server.wait_until_free()


def test_38_a_disconnect_during_prefill_frees_the_memory(slow_server: Server) -> None:
    connection = send_request(slow_server, prompt=[5] * 8000, max_tokens=100)
    wait_for(lambda: slow_server.metric("num_requests_running") == 1)
    connection.close()
    slow_server.wait_until_free()


def test_39_a_full_queue_is_a_429_with_retry_after(slow_server: Server) -> None:
    connections = [send_request(slow_server, stream=True)]
    wait_for(lambda: slow_server.metric("num_requests_running") == 1)
    connections += [send_request(slow_server) for _ in range(2)]
    wait_for(lambda: slow_server.metric("num_requests_waiting") == 2)
    for stream in (True, False):
        refused = slow_server.complete(stream=stream)
        assert refused.status_code == 429 and refused.json()["error"]["code"] == "queue_full"
        assert int(refused.headers["retry-after"]) >= 1
    for connection in connections:
        connection.close()
    slow_server.wait_until_free()


def test_a_deadline_ends_a_request_with_a_504(slow_server: Server) -> None:
    response = slow_server.complete(max_tokens=8000, ignore_eos=True, deadline=0.3)
    assert response.status_code == 504 and response.json()["error"]["code"] == "deadline_exceeded"
    slow_server.wait_until_free()


STALLING: dict[str, Any] = {"n": 8, "max_tokens": 2000, "prompt": [1], "logprobs": 20, "receive_buffer": 4096}
"""An answer of about 10 MB, more than all buffers hold, and a client with a small receive buffer."""


def test_39_a_reader_that_is_too_slow_is_cancelled_with_an_error(default_model_path: Path) -> None:
    with running_server(default_model_path, engine={"stream_buffer": 64}) as server:
        connection = send_request(server, stream=True, **STALLING)
        connection.recv(1, socket.MSG_PEEK)  # headers are sent with the first token
        wait_for(lambda: not any(server.metrics("num_requests_running", "num_requests_waiting")))
        assert server.complete().status_code == 200
        received = b""
        while part := connection.recv(1 << 20):
            received += part
            if b"\r\n0\r\n" in part[-16:]:
                break
        connection.close()
        assert b'"code":"slow_reader"' in received and b"[DONE]" not in received
        server.wait_until_free()


def is_open(server: Server, connection: socket.socket) -> bool:
    """Whether the server holds its end of the connection. Counting its sockets would not do: it also closes other
    connections, after some idle time."""
    ends = server.port, connection.getsockname()[1]
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, remote, *rest = line.split()
        if ends == tuple(int(address.rpartition(":")[2], 16) for address in (local, remote)):
            return rest[6] != "0"  # the inode; a closed socket that still has bytes to send has none
    return False


def test_a_stalled_reader_of_a_stream_is_disconnected_and_its_request_ends(
    default_model_path: Path,
) -> None:
    """The answer is cancelled at once. The request and its slot of the key end at the disconnect."""
    keys = [api_key("one", concurrent=1), api_key("other")]
    other = {"Authorization": "Bearer other"}
    with running_server(
        default_model_path, stalled_reader_seconds=1.0, api_keys=keys, headers=other
    ) as server:
        connection = send_request(server, stream=True, key="one", **STALLING)
        connection.recv(1, socket.MSG_PEEK)
        assert server.metric("http_requests_open") == 1
        server.wait_until_free()  # the client has read nothing
        body = {"prompt": "x", "max_tokens": 1}
        again = httpx.post(
            f"{server.url}/v1/completions", json=body, headers={"Authorization": "Bearer one"}, timeout=60
        )
        assert again.status_code == 200
        connection.close()


def test_a_stalled_reader_of_a_whole_answer_is_disconnected(default_model_path: Path) -> None:
    with running_server(default_model_path, stalled_reader_seconds=1.0) as server:
        connection = send_request(server, **STALLING)
        connection.recv(1, socket.MSG_PEEK)
        assert is_open(server, connection)
        wait_for(lambda: not is_open(server, connection))
        server.wait_until_free()
        connection.close()


def test_a_stalled_reader_of_any_other_response_is_disconnected(default_model_path: Path) -> None:
    with running_server(default_model_path, stalled_reader_seconds=1.0) as server:
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", server.port))
        # Many requests on one connection: their responses are more than all buffers hold.
        connection.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 500)
        connection.recv(1, socket.MSG_PEEK)
        assert is_open(server, connection)
        wait_for(lambda: not is_open(server, connection))
        connection.close()


def test_40_sigterm_does_not_wait_for_a_client_that_does_not_read(default_model_path: Path) -> None:
    with running_server(default_model_path, stalled_reader_seconds=3600.0) as server:
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", server.port))
        connection.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 500)
        connection.recv(1, socket.MSG_PEEK)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
        connection.close()


def test_a_slow_reader_that_keeps_reading_is_not_disconnected(default_model_path: Path) -> None:
    """It reads for several times the timeout, and gets the complete answer."""
    with running_server(default_model_path, stalled_reader_seconds=2.0) as server:
        connection = send_request(server, **STALLING)
        received, ends_at = bytearray(), time.monotonic() + 8.0
        while time.monotonic() < ends_at:
            received += connection.recv(1 << 15)
            time.sleep(0.05)
        head, _, body = bytes(received).partition(b"\r\n\r\n")
        found = re.search(rb"content-length: (\d+)", head)
        assert found is not None
        while len(body) < int(found[1]):
            part = connection.recv(1 << 20)
            assert part, "the connection was closed"
            body += part
        connection.close()
        assert len(json.loads(body)["choices"]) == 8


HELD_START = """
import pathlib, sys, time
while "weft.engine.ipc.process" in " ".join(sys.orig_argv) and pathlib.Path({!r}).exists():
    time.sleep(0.01)
"""


def test_40_a_killed_engine_fails_its_requests_and_restarts(default_model_path: Path, tmp_path: Path) -> None:
    hold = tmp_path / "hold"  # while this file exists no engine starts, so that the state can be checked
    (tmp_path / "sitecustomize.py").write_text(HELD_START.format(str(hold)))
    with running_server(default_model_path, python_path=[str(tmp_path)]) as server:
        engine = server.engine_pid()
        statuses: list[int] = []

        def ask_whole() -> None:
            with httpx.Client(base_url=server.url, timeout=60) as client:
                statuses.append(client.post("/v1/completions", json={**LONG, "n": 20}).status_code)

        pending = threading.Thread(target=ask_whole)
        pending.start()
        with server.client.stream(
            "POST", "/v1/completions", json={**LONG, "n": 20, "stream": True}
        ) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: ")
            wait_for(lambda: server.metric("num_requests_running") == 40)
            hold.touch()
            os.kill(engine, signal.SIGKILL)
            *_, last = (line for line in lines if line)
        error = json.loads(last.removeprefix("data: "))["error"]
        assert error["code"] == "engine_died" and error["type"] == "server_error"
        pending.join()
        assert statuses == [503]
        assert [server.client.get(path).status_code for path in ("/health", "/ready")] == [503, 503]
        hold.unlink()
        wait_for(lambda: server.client.get("/ready").status_code == 200)
        assert server.client.get("/health").status_code == 200
        assert server.engine_pid() != engine
        assert server.metric("engine_restarts_total") == 1
        assert server.complete().status_code == 200
        server.wait_until_free()


def test_40_sigterm_lets_active_requests_end_refuses_new_ones_and_ends_all_processes(
    default_model_path: Path,
) -> None:
    with running_server(default_model_path, drain_seconds=60) as server:
        children, engine = server.children(), server.engine_pid()
        body = {**LONG, "max_tokens": 2000, "n": 2, "stream": True}
        with server.client.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            os.kill(engine, signal.SIGSTOP)  # the stream must not end before the checks below
            server.process.send_signal(signal.SIGTERM)
            wait_for(lambda: server.client.get("/ready").status_code == 503)
            refused = server.complete()
            assert refused.status_code == 503 and refused.json()["error"]["code"] == "draining"
            assert refused.headers["retry-after"] == "60"  # the drain time
            assert server.client.get("/health").status_code == 200
            os.kill(engine, signal.SIGCONT)
            *_, last = (line for line in lines if line)
        assert last == "data: [DONE]"
        assert server.process.wait(60) == 0
        wait_for(lambda: not [pid for pid in children if Path(f"/proc/{pid}").exists()])


def test_40_requests_that_do_not_end_in_the_drain_time_get_an_error(
    default_model_path: Path,
) -> None:
    with running_server(default_model_path, drain_seconds=0.2) as server:
        body = {**LONG, "n": 20, "stream": True}
        with server.client.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            *_, last = (line for line in lines if line)
        assert "error" in json.loads(last.removeprefix("data: "))
        assert server.process.wait(60) == 0


def test_40_a_second_signal_stops_at_once_and_ends_all_processes(default_model_path: Path) -> None:
    with running_server(default_model_path) as server:
        children = server.children()
        connection = send_request(server, **LONG, n=20, stream=True)
        wait_for(lambda: server.metric("num_requests_running") > 0)
        server.process.send_signal(signal.SIGTERM)
        wait_for(lambda: server.client.get("/ready").status_code == 503)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 128 + signal.SIGTERM
        connection.close()
        wait_for(lambda: not [pid for pid in children if Path(f"/proc/{pid}").exists()])


def test_a_signal_while_the_model_is_loaded_ends_the_server(default_model_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    process = subprocess.Popen(weft(str(default_model_path), "--port", "0"), env=environment)
    started = Server(process, 0, httpx.Client())  # type: ignore[arg-type]

    def has_engine() -> bool:
        try:
            return bool(started.engine_pid())
        except AssertionError:
            return False

    wait_for(has_engine)
    engine = started.engine_pid()
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    wait_for(lambda: not Path(f"/proc/{engine}").exists())


def test_a_killed_server_leaves_no_process_running(default_model_path: Path) -> None:
    with running_server(default_model_path) as server:
        children = server.children()
        assert children
        server.process.kill()
        server.process.wait(60)
        wait_for(lambda: not [pid for pid in children if Path(f"/proc/{pid}").exists()])


def test_an_idle_server_uses_almost_no_cpu(default_model_path: Path) -> None:
    def ticks(pids: list[int]) -> int:
        stats = (Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids)
        return sum(int(fields[11]) + int(fields[12]) for fields in stats)

    with running_server(default_model_path) as server:
        assert server.complete().status_code == 200
        pids = [server.process.pid, *server.children()]

        def is_idle() -> bool:
            """Whether a second passes without CPU use. Work after the start may take a while."""
            before = ticks(pids)
            time.sleep(1.0)
            return ticks(pids) - before <= 1  # one tick is 10 ms

        wait_for(is_idle)


def weft(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "weft.cli.main", "serve", *arguments]


def test_the_command_prints_the_model_and_the_address_and_ctrl_c_ends_it(default_model_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "WEFT_API_KEY": "secret"}
    environment["WEFT_SERVE_LOG_FORMAT"] = "text"
    process = subprocess.Popen(
        weft(str(default_model_path), "--port", "0", "--name", MODEL, "--context", "512"),
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert process.stderr is not None
    try:
        output = ""
        while "Serving" not in output:
            line = process.stderr.readline()
            assert line, output
            output += line
        assert MODEL in output and "KV cache" in output and "512 in one context" in output
        found = re.search(r"http://127\.0\.0\.1:\d+/v1", output)
        assert found is not None
        others = f"of Anthropic and Ollama at {found[0].removesuffix('/v1')};"
        assert f"Serving the APIs of OpenAI at {found[0]}, {others}" in output
        headers = {"Authorization": "Bearer secret"}
        models = httpx.get(f"{found[0]}/models", headers=headers, timeout=60).json()["data"]
        assert [(model["id"], model["max_model_len"]) for model in models] == [(MODEL, 512)]
        assert httpx.get(f"{found[0]}/models", timeout=60).status_code == 401
        page = re.search(r"http://127\.0\.0\.1:\d+/docs", output)
        assert page is not None and httpx.get(page[0], timeout=60).status_code == 200, (
            "the docs page needs no key"
        )
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


@pytest.mark.parametrize(
    ("arguments", "exit_code", "message"),
    [
        (["/nowhere/model.gguf"], 2, "/nowhere/model.gguf"),
        (["default", "--context", "1"], 2, "context is 1; allowed: a whole number from 2"),
        (["default", "--api-key-file", "/dev/null"], 2, "it contains no key"),
    ],
)
def test_errors_of_the_command_are_one_line(arguments: list[str], exit_code: int, message: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    done = subprocess.run(
        weft(*arguments, "--port", "0"), capture_output=True, text=True, env=environment, timeout=60
    )
    assert done.returncode == exit_code
    assert done.stderr.startswith("weft: ") and message in done.stderr and done.stderr.count("\n") == 1


def test_the_command_reports_a_port_in_use(shared_server: Server, default_model_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    command = weft(str(default_model_path), "--port", str(shared_server.port))
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == 1 and "cannot listen" in done.stderr and str(shared_server.port) in done.stderr
