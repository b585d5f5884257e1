"""Live data of a real server: what the frames say, who may read them, and that no viewer harms the server."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import httpx
import pytest
from in_process import in_process
from server_process import MODEL, SLOW, Server, api_key, running_server, wait_for

from weft.engine.ipc.shared_answers import SharedReader
from weft.live import LiveEvent, LiveFrame, LiveInfo, LiveRequest
from weft.request import RequestId
from weft.server.admission.active_requests import ActiveRequest
from weft.server.live.feed import MAX_VIEWERS
from weft.server.live.held import HeldRequest, requests_of_server
from weft.server.stream.choices import Choices

LONG: dict[str, Any] = {"prompt": "Hello", "max_tokens": 6000, "ignore_eos": True, "stream": True}
REQUEST, EVENT = LiveRequest._fields, LiveEvent._fields


class Frames:
    """Reads the frames of one viewer. `requests` and `events` are as objects."""

    def __init__(self, response: httpx.Response) -> None:
        self._lines = response.iter_lines()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for line in self._lines:
            if line:
                assert line.startswith("data: "), line
                yield _read(json.loads(line[6:]))

    def next(self) -> dict[str, Any]:
        return next(iter(self))

    def until(self, condition: Any) -> dict[str, Any]:
        give_up_at = time.monotonic() + 60
        for frame in self:
            if condition(frame):
                return frame
            assert time.monotonic() < give_up_at, "no such frame"
        raise AssertionError("the stream ended")


def _read(frame: dict[str, Any]) -> dict[str, Any]:
    for name, names in (("requests", REQUEST), ("events", EVENT)):
        if name in frame:
            frame[name] = [dict(zip(names, values, strict=True)) for values in frame[name]]
    return frame


@contextmanager
def viewer(server: Server, **more: Any) -> Iterator[Frames]:
    with (
        httpx.Client(base_url=server.url, headers=server.client.headers, timeout=60) as client,
        client.stream("GET", "/live", **more) as response,
    ):
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        yield Frames(response)


@contextmanager
def answer(server: Server, **more: Any) -> Iterator[str]:
    """A streamed answer. The id of its request."""
    with (
        httpx.Client(base_url=server.url, timeout=60) as client,
        client.stream("POST", "/v1/completions", json={**LONG, **more.pop("body", {})}, **more) as response,
    ):
        lines = response.iter_lines()  # kept: the stream would be closed with it
        assert json.loads(next(lines)[6:])
        yield response.headers["x-request-id"]


@pytest.fixture(scope="module")
def slow_server(default_model_path: Path) -> Iterator[Server]:
    with running_server(default_model_path, backend_options=SLOW) as server:
        yield server


def test_the_frames_have_the_requests_steps_and_ends_that_clients_see(slow_server: Server) -> None:
    with viewer(slow_server) as frames:
        first = frames.next()
        assert {field.name for field in fields(LiveFrame)} < set(first)
        assert first["requests"] == first["steps"] == []
        with answer(slow_server) as name:
            seen = frames.until(lambda frame: frame["requests"])
            later = frames.until(lambda frame: frame["step"] > seen["step"] + 10)
        end = frames.until(lambda frame: any(one["kind"] == "finished" for one in frame["events"]))
    for frame in (first, seen, later, end):
        assert (frame["model"], frame["replica"], frame["engine"]) == (MODEL, 0, "ready")
    (before,), (after,) = seen["requests"], later["requests"]
    assert before["request_id"] == after["request_id"] == name
    assert after["num_tokens"] > before["num_tokens"] and after["state"] == "decoding" and later["open"] == 1
    assert later["steps"] and end["events"][-1]["request_id"] == name
    info = slow_server.client.get("/live/info").json()
    assert {field.name for field in fields(LiveInfo)} < set(info)
    assert (info["mode"], info["model"], info["replica"]) == ("live", MODEL, 0)
    assert info["reasons"][end["events"][-1]["first"]] == "cancelled"


def test_the_steps_of_the_frames_follow_each_other_without_a_gap(slow_server: Server) -> None:
    with viewer(slow_server) as frames, answer(slow_server):
        frames.until(lambda frame: frame["steps"])
        steps = [step[0] for _ in range(10) for step in frames.next()["steps"]]
    assert steps == list(range(steps[0], steps[0] + len(steps)))


def test_there_are_at_most_ten_frames_a_second(slow_server: Server) -> None:
    began = time.monotonic()
    content = slow_server.client.get("/live?frames=21").text
    assert time.monotonic() - began > 20 * 0.099
    assert content.count("data: ") == 21 and content.endswith("}\n\n")


@pytest.mark.parametrize("number", ["0", "-1", "x", "1e3", "10000000", "9" * 5000, "", "\u0663"])
def test_a_wrong_number_of_frames_is_refused_with_the_allowed_range(slow_server: Server, number: str) -> None:
    response = slow_server.client.get("/live", params={"frames": number})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "frames")
    assert "allowed: 1 to 1000000" in error["message"] and len(error["message"]) < 200


# --- who may see it ---

ADMIN_ROUTES = ("/live", "/live/info", "/live/requests/1", "/admin/requests")


def test_live_data_need_the_admin_key_where_there_are_keys(default_model_path: Path) -> None:
    with running_server(
        default_model_path, api_keys=[api_key("boss", admin=True), api_key("user")]
    ) as server:

        def status(path: str, key: str) -> tuple[int, str]:
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            response = server.client.get(path, headers=headers, params={"frames": 1})
            return response.status_code, response.json()["error"]["code"] if response.is_error else ""

        for path in ADMIN_ROUTES[:3]:
            assert status(path, "") == status(path, "wrong") == (401, "invalid_api_key")
            assert status(path, "user") == (403, "admin_key_required")
        assert status("/live", "boss")[0] == status("/live/info", "boss")[0] == 200
        assert status("/live/requests/1", "boss") == (403, "prompts_hidden")
        assert server.client.get("/").status_code == 200


@pytest.mark.parametrize(("host", "status"), [("127.0.0.1", 200), ("0.0.0.0", 403)])
def test_without_keys_live_data_and_cancelling_are_open_on_loopback_only(
    default_model_path: Path, host: str, status: int
) -> None:
    async def run() -> None:
        async with in_process(default_model_path, host=host) as server:
            for path in ("/live?frames=1", "/live/info", "/admin/requests"):
                reply = await server.send(path, method="GET")
                assert reply.status == status, path
            if status == 403:
                assert b"admin = true" in reply.body
            reply = await server.send("/admin/requests/1", method="DELETE")
            assert reply.status == (404 if status == 200 else 403)

    asyncio.run(run())


def test_another_web_page_cannot_read_live_data_or_cancel(slow_server: Server) -> None:
    headers = {"Origin": "http://evil.example"}
    for method, path in (("GET", "/live"), ("GET", "/live/info"), ("DELETE", "/admin/requests/1")):
        assert slow_server.client.request(method, path, headers=headers).status_code == 403


@pytest.mark.parametrize("allowed", ["*", "http://friend.example"])
def test_pages_of_allowed_origins_may_use_the_model_but_not_watch_or_cancel(
    default_model_path: Path, allowed: str
) -> None:
    async def run() -> None:
        async with in_process(default_model_path, allowed_origins=(allowed,)) as server:
            for origin, status in (("http://friend.example", 403), ("http://localhost", 200)):
                headers = {b"origin": origin.encode()}
                for path in ("/live?frames=1", "/live/info", "/admin/requests"):
                    assert (await server.send(path, method="GET", more_headers=headers)).status == status
                reply = await server.send("/v1/models", method="GET", more_headers=headers)
                assert reply.status == 200

    asyncio.run(run())


def test_prompts_are_shown_only_if_the_server_allows_it(
    default_model_path: Path, slow_server: Server
) -> None:
    def shown(server: Server, name: str) -> httpx.Response:
        return server.client.get(f"/live/requests/{name}")

    with answer(slow_server, body={"prompt": "my secret"}) as name, viewer(slow_server) as frames:
        refused = shown(slow_server, name)
        assert refused.status_code == 403 and refused.json()["error"]["code"] == "prompts_hidden"
        frame = frames.until(lambda frame: frame["requests"])
        assert "secret" not in json.dumps(frame)
    with running_server(default_model_path, backend_options=SLOW, show_prompts=True) as server:
        assert server.client.get("/live/info").json()["show_prompts"] is True
        with answer(server, body={"prompt": ["first", "my secret"], "n": 2}) as name:
            for part in ("-1", "-1-0", "-1-1"):
                assert shown(server, name + part).json() == {"id": name + part, "prompt": "my secret"}
            assert shown(server, name).json()["prompt"] == "first"
            assert shown(server, "nothing").status_code == 404
        wait_for(lambda: shown(server, name).status_code == 404)


# --- what only the server knows ---


def test_frames_name_the_keys_of_requests_and_what_the_server_holds_back(default_model_path: Path) -> None:
    keys = [api_key("boss", admin=True), api_key("user")]
    engine = {"scheduler": {"max_running": 1}}
    headers = {"Authorization": "Bearer boss"}
    with (
        running_server(
            default_model_path, backend_options=SLOW, api_keys=keys, engine=engine, headers=headers
        ) as server,
        ExitStack() as stack,
        viewer(server) as frames,
    ):
        user = {"Authorization": "Bearer user"}
        running = stack.enter_context(answer(server, headers=user))
        body = json.dumps({**LONG, "n": 12, "priority": "low", "deadline": 500}).encode()
        waiting = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), 60))
        waiting.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer boss\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
        )
        frame = frames.until(lambda frame: any(one[2] == "held" for one in frame["held"]))
        (held,) = frame["held"]
        assert frame["keys"][running] == "user" and frame["num_held"] == 1 and frame["open"] == 2
        one = HeldRequest(*held)
        assert (one.key, one.state, one.priority, one.prompt_tokens) == ("boss", "held", 0, 1)
        assert one.age >= 0 and 1 <= one.num_answers <= 12
        assert one.left is not None and one.left == pytest.approx(500 - one.age, abs=0.01)
        name = one.request_id
        assert frame["keys"][name] == "boss"


def test_each_request_that_shares_a_sequence_is_shown_and_cancelled_by_its_own_id(
    default_model_path: Path,
) -> None:
    with (
        running_server(default_model_path, backend_options=SLOW, show_prompts=True) as server,
        viewer(server) as frames,
        ExitStack() as stack,
    ):

        def shown(readers: list[str]) -> dict[str, Any]:
            return frames.until(lambda frame: [one[0] for one in frame["readers"]] == readers)

        bodies = ({"seed": 1}, {"seed": 1}, {"seed": 1, "deadline": 500})
        names = [stack.enter_context(answer(server, body=body)) for body in bodies]
        other = stack.enter_context(answer(server, body={"seed": 2}))
        frame = frames.until(lambda frame: len(frame["requests"]) == 2)
        assert [one["request_id"] for one in frame["requests"]] == [names[0], other]
        readers = [SharedReader(*one) for one in shown(names)["readers"]]
        assert {one.sequence_id for one in readers} == {names[0]}
        assert [one.left and round(one.left + one.age) for one in readers] == [None, None, 500]
        for name in names:
            assert server.client.get(f"/live/requests/{name}").json() == {"id": name, "prompt": "Hello"}
        left = list(names)
        for name in (names[0], names[2]):  # the sequence keeps the id of its first reader
            assert server.client.delete(f"/admin/requests/{name}").status_code == 200
            left.remove(name)
            before = shown(left)
            frames.until(lambda frame, before=before: frame["step"] > before["step"] + 3)
            assert frames.next()["requests"][0]["request_id"] == names[0]
            assert server.client.get(f"/live/requests/{name}").status_code == 404
            assert server.client.delete(f"/admin/requests/{name}").status_code == 404
        assert server.client.delete(f"/admin/requests/{names[1]}").status_code == 200
        end = frames.until(lambda frame: any(one["kind"] == "finished" for one in frame["events"]))
        assert end["events"][-1]["request_id"] == names[0] and end["readers"] == []
        assert [one["request_id"] for one in end["requests"]] == [other]


def test_what_is_not_known_of_a_request_before_it_is_prepared_is_null() -> None:
    preparing = ActiveRequest(None, None, Choices.__new__(Choices), began=5.0, request_id=RequestId("one"))
    preparing.deadline = 60.0
    found = requests_of_server([preparing], 7.5)
    assert found.held == [HeldRequest(RequestId("one"), None, "preparing", None, 2.5, 0, None, 57.5)]


# --- engines that stop, and the end of the server ---


def test_without_viewers_the_engine_is_asked_for_nothing(default_model_path: Path) -> None:
    async def run() -> None:
        async with in_process(default_model_path) as server:
            app = server.server
            asked: list[object] = []
            ask = app.engine.live_frame

            def counted() -> Any:
                asked.append(None)
                return ask()

            app.engine.live_frame = counted  # type: ignore[method-assign]
            assert (await server.send("/live?frames=3", method="GET")).status == 200
            task = app.live._task
            assert task is not None and 3 <= len(asked) <= 4
            await asyncio.wait_for(task, 60)  # it ends by itself
            num_asked = len(asked)
            await server.send("/v1/completions", b'{"prompt": "x", "max_tokens": 3}')
            assert len(asked) == num_asked
            assert (await server.send("/live?frames=1", method="GET")).status == 200
            assert len(asked) > num_asked

    asyncio.run(run())


def test_a_silent_engine_is_reported_and_its_next_frame_has_the_events_of_the_pause(
    slow_server: Server,
) -> None:
    with viewer(slow_server) as frames, answer(slow_server) as name:
        frames.until(lambda frame: frame["requests"])
        os.kill(slow_server.engine_pid(), signal.SIGSTOP)
        try:
            silent = frames.until(lambda frame: frame["engine"] == "silent")
        finally:
            os.kill(slow_server.engine_pid(), signal.SIGCONT)
        assert "requests" not in silent and (silent["model"], silent["replica"]) == (MODEL, 0)
        again = frames.until(lambda frame: frame["engine"] == "ready")
        assert [one["request_id"] for one in again["requests"]] == [name]


def test_the_stream_goes_on_when_the_engine_is_restarted(default_model_path: Path) -> None:
    with running_server(default_model_path, backend_options=SLOW) as server, viewer(server) as frames:
        frames.until(lambda frame: frame["engine"] == "ready")
        os.kill(server.engine_pid(), signal.SIGKILL)
        frames.until(lambda frame: frame["engine"] == "starting")
        frames.until(lambda frame: frame["engine"] == "ready")
        with answer(server) as name:
            frame = frames.until(lambda frame: frame["requests"])
            assert frame["requests"][0]["request_id"] == name


def test_sigterm_ends_the_streams_of_viewers(default_model_path: Path) -> None:
    with running_server(default_model_path, backend_options=SLOW) as server, viewer(server) as frames:
        frames.next()
        server.process.send_signal(signal.SIGTERM)
        for _ in frames:  # ends without an error: the response is complete
            pass
        assert server.process.wait(60) == 0


# --- viewers that harm ---


def open_viewer(server: Server, receive_buffer: int | None = None) -> socket.socket:
    connection = socket.socket()
    connection.settimeout(60)
    if receive_buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.connect(("127.0.0.1", server.port))
    connection.sendall(b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n")
    return connection


def resident_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmRSS"))


@contextmanager
def busy(server: Server, number: int) -> Iterator[None]:
    """`number` requests whose streams are read."""
    closing, started = threading.Event(), threading.Semaphore(0)
    body = {**LONG, "prompt": [f"Number {one}" for one in range(number)]}

    def read() -> None:
        with (
            httpx.Client(base_url=server.url, timeout=60) as client,
            client.stream("POST", "/v1/completions", json=body) as response,
        ):
            for _ in response.iter_bytes():
                started.release()
                if closing.is_set():
                    return

    thread = threading.Thread(target=read)
    thread.start()
    try:
        assert started.acquire(timeout=60)
        yield
    finally:
        closing.set()
        thread.join(60)


def test_viewers_that_do_not_read_keep_no_frames_and_delay_nobody(default_model_path: Path) -> None:
    """If each of them kept the frames that it missed, they would be more than 100 MB."""
    with running_server(default_model_path, backend_options={**SLOW, "seconds_per_step": 0.05}) as server:
        with busy(server, 256), viewer(server) as frames, ExitStack() as stack:
            for _ in range(MAX_VIEWERS - 1):
                connection = stack.enter_context(open_viewer(server, 4096))
                assert connection.recv(1)
            size = len(json.dumps(frames.until(lambda frame: len(frame["requests"]) == 256)))
            for _ in range(20):
                frames.next()
            before = resident_bytes(server.process.pid)
            first = frames.next()
            for _ in range(120):
                last = frames.next()
            assert size * 120 * (MAX_VIEWERS - 1) > 100e6
            assert resident_bytes(server.process.pid) - before < 30e6
            assert last["step"] > first["step"] and len(last["requests"]) == 256
        server.wait_until_free()


def test_a_viewer_that_does_not_read_is_disconnected(default_model_path: Path) -> None:
    options = {**SLOW, "seconds_per_step": 0.05}
    with (
        running_server(default_model_path, backend_options=options, stalled_reader_seconds=1.0) as server,
        busy(server, 256),
        viewer(server) as frames,
        open_viewer(server, 4096) as stalled,
    ):
        others = [open_viewer(server) for _ in range(MAX_VIEWERS - 2)]
        try:
            for connection in others:
                assert connection.recv(12) == b"HTTP/1.1 200"
            assert server.client.get("/live?frames=1").status_code == 429
            for connection in others[1:]:
                connection.close()
            assert stalled.recv(12) == b"HTTP/1.1 200"
            with pytest.raises(ConnectionError):
                for _ in range(1000):  # until the server aborts the connection
                    frames.next()
                    stalled.send(b"\r\n")
        finally:
            for connection in others:
                connection.close()


def test_viewers_that_left_keep_no_memory(default_model_path: Path) -> None:
    options = {**SLOW, "seconds_per_step": 0.05}

    def come_and_go(server: Server) -> None:
        with ExitStack() as stack:
            connections = [stack.enter_context(open_viewer(server)) for _ in range(200)]
            for connection in connections:
                assert connection.recv(1)
        wait_for(lambda: server.metric("http_requests_open") == 1)

    with running_server(default_model_path, backend_options=options) as server, busy(server, 256):
        for _ in range(2):  # the allocator gets its arenas
            come_and_go(server)
        before = resident_bytes(server.process.pid)
        for _ in range(6):
            come_and_go(server)
        # If each of them kept 20 KB, these would be 24 MB. The frame of 256 requests is larger.
        assert resident_bytes(server.process.pid) - before < 12e6


def test_of_200_viewers_32_get_frames_and_the_others_a_429_with_retry_after(slow_server: Server) -> None:
    before = slow_server.metric("http_requests_open")
    with ExitStack() as stack, answer(slow_server) as name:
        connections = [stack.enter_context(open_viewer(slow_server)) for _ in range(200)]
        heads = [connection.recv(1 << 16) for connection in connections]
        refused = [head for head in heads if head.startswith(b"HTTP/1.1 429")]
        accepted = [
            connection
            for connection, head in zip(connections, heads, strict=True)
            if head.startswith(b"HTTP/1.1 200")
        ]
        assert len(accepted) == MAX_VIEWERS and len(refused) == 200 - MAX_VIEWERS
        assert all(b"retry-after: " in head.lower() for head in refused)
        assert b"32 viewers read live data; allowed: 32" in slow_server.client.get("/live").content
        for connection in accepted:
            received = b""
            while name.encode() not in received:
                received += connection.recv(1 << 16)
    wait_for(lambda: slow_server.client.get("/live?frames=1").status_code == 200)
    slow_server.wait_until_free()
    assert slow_server.metric("http_requests_open") == before
