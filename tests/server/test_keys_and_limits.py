"""Several keys on one server: rate limits, fair sharing, separate caches, and admin routes."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_process import SLOW, Server, api_key, running_server, wait_for

LONG: dict[str, Any] = {"prompt": "x", "max_tokens": 8000, "ignore_eos": True}
OPERATOR = {"Authorization": "Bearer operator"}


@pytest.fixture(scope="module")
def shared_keys(default_model_path: Path) -> Iterator[Server]:
    """A server with several keys. Tests use the operator's key unless they name another."""
    keys = [
        api_key("operator", admin=True, max_priority=3),
        api_key("tenant", max_priority=1),
        api_key("slow", requests_per_minute=3),
        api_key("small", tokens_per_minute=10),
        api_key("single", concurrent=1),
        api_key("mate-1", cache_salt="team"),
        api_key("mate-2", cache_salt="team"),
    ]
    with running_server(default_model_path, backend_options=SLOW, api_keys=keys, headers=OPERATOR) as server:
        yield server


@pytest.fixture
def keys(shared_keys: Server) -> Iterator[Server]:
    yield shared_keys
    shared_keys.wait_until_free()
    assert shared_keys.metric("num_requests_held") == 0


def ask(server: Server, key: str, prompt: Any = "Hello", **fields: Any) -> httpx.Response:
    body = {"prompt": prompt, "max_tokens": 4, "ignore_eos": True, **fields}
    return server.client.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"})


def open_stream(server: Server, key: str, **fields: Any) -> socket.socket:
    body = json.dumps({**LONG, "stream": True, **fields}).encode()
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=60)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\n"
    connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return connection


def test_39_requests_beyond_the_rate_limit_get_a_429_with_the_rest_and_retry_after(
    keys: Server,
) -> None:
    answers = [ask(keys, "slow") for _ in range(4)]
    assert [answer.status_code for answer in answers] == [200, 200, 200, 429]
    assert [answer.headers["x-ratelimit-remaining-requests"] for answer in answers] == ["2", "1", "0", "0"]
    refused = answers[-1]
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert refused.json()["error"]["type"] == "rate_limit_error"
    assert 1 <= int(refused.headers["retry-after"]) <= 20
    assert refused.headers["x-ratelimit-limit-requests"] == "3"
    assert refused.headers["x-ratelimit-reset-requests"].endswith("s")
    other = keys.client.post("/tokenize", json={"prompt": "x"}, headers={"Authorization": "Bearer slow"})
    assert other.status_code == 429
    assert ask(keys, "tenant").status_code == 200
    assert "x-ratelimit-limit-requests" not in ask(keys, "tenant").headers


def test_39_a_key_is_charged_the_tokens_it_used_and_none_for_refused_requests(keys: Server) -> None:
    refused = ask(keys, "small", [10**6], max_tokens=8)
    assert refused.status_code == 400 and refused.headers["x-ratelimit-limit-tokens"] == "10"
    assert ask(keys, "small", [5], stream=True, min_tokens=9, max_tokens=2).status_code == 400
    # It needs more tokens than the bucket holds, so it takes a full bucket: refused requests cost nothing.
    answer = ask(keys, "small", [5] * 10, max_tokens=6)
    assert answer.status_code == 200 and answer.headers["x-ratelimit-remaining-tokens"] == "0"
    late = ask(keys, "small", [5], max_tokens=3)
    assert late.status_code == 429 and "needs 4" in late.json()["error"]["message"]
    # 4 + 6 owed tokens, one per 6 s, minus what was refilled meanwhile
    assert 12 <= int(late.headers["retry-after"]) <= 60


def test_39_a_key_has_a_limit_of_concurrent_requests(keys: Server) -> None:
    with open_stream(keys, "single"):
        wait_for(lambda: keys.metric("http_requests_open") == 1)
        refused = ask(keys, "single")
        assert refused.status_code == 429 and refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert int(refused.headers["retry-after"]) >= 1
        assert ask(keys, "tenant").status_code == 200
    wait_for(lambda: keys.metric("http_requests_open") == 0)
    assert ask(keys, "single").status_code == 200


def test_a_priority_above_that_of_the_key_is_refused_with_both_values(keys: Server) -> None:
    refused = ask(keys, "tenant", priority="high")
    error = refused.json()["error"]
    assert refused.status_code == 403 and error["param"] == "priority"
    assert "high" in error["message"] and "at most normal" in error["message"]
    assert ask(keys, "tenant", priority="low").status_code == 200
    assert ask(keys, "operator", priority="critical").status_code == 200


def test_37_keys_share_no_cache_unless_they_have_the_same_salt(keys: Server) -> None:
    prompt = list(range(300, 400))

    def cached(key: str, salt: str = "") -> int:
        usage = ask(keys, key, prompt, cache_salt=salt).json()["usage"]
        number: int = usage["prompt_tokens_details"]["cached_tokens"]
        return number

    assert cached("tenant") == 0
    assert cached("tenant") >= 80
    assert cached("operator") == cached("operator", "team") == cached("mate-1") == 0
    assert cached("mate-2") >= 80
    assert cached("mate-2", "apart") == 0
    assert cached("tenant", "apart") == 0


def test_06_an_admin_route_accepts_only_an_admin_key(keys: Server, default_model_path: Path) -> None:
    for headers in ({"Authorization": ""}, {"Authorization": "Bearer tenant"}, {"Authorization": "Bearer x"}):
        for answer in (
            keys.client.get("/admin/requests", headers=headers),
            keys.client.delete("/admin/requests/1", headers=headers),
            keys.client.get("/admin", headers=headers),
            keys.client.get("/admin/nowhere", headers=headers),
        ):
            assert answer.status_code == 403 and answer.json()["error"]["code"] == "admin_key_required"
    assert keys.client.get("/admin/requests").json() == {"object": "list", "data": []}
    assert keys.client.delete("/admin/requests/1").status_code == 404
    assert ask(keys, "operator").status_code == 200
    with running_server(default_model_path, api_keys=[api_key("tenant")]) as server:
        off = server.client.get("/admin/requests", headers={"Authorization": "Bearer tenant"})
    assert off.status_code == 403 and "admin = true" in off.json()["error"]["message"]


@pytest.mark.parametrize("stream", [True, False])
def test_an_operator_can_list_and_cancel_active_requests(keys: Server, stream: bool) -> None:
    body = {**LONG, "stream": stream, "n": 2}
    headers = {"Authorization": "Bearer tenant"}
    with ThreadPoolExecutor(1) as threads:
        pending = threads.submit(keys.client.post, "/v1/completions", json=body, headers=headers)
        with httpx.Client(base_url=keys.url, headers=OPERATOR, timeout=60) as operator:
            seen: list[dict[str, Any]] = []

            def is_running() -> bool:
                seen[:] = operator.get("/admin/requests").json()["data"]
                return bool(seen) and seen[0]["state"] == "running"

            wait_for(is_running)
            [one] = seen
            assert one["key"] == "tenant" and one["answers"] == 2 and one["age"] >= 0
            assert one["prompt_tokens"] == 1 and one["completion_tokens"] > 0
            assert operator.delete(f"/admin/requests/{one['id']}").json()["cancelled"] is True
            answer = pending.result(60)
    if stream:
        assert answer.headers["x-request-id"] == one["id"]
        last = answer.text.strip().splitlines()[-1].removeprefix("data: ")
    else:
        assert answer.status_code == 403
        last = answer.text
    error = json.loads(last)["error"]
    assert error["code"] == "cancelled" and "operator" in error["message"]


def used(server: Server, key: str, name: str) -> float:
    lines = server.client.get("/metrics").text.splitlines()
    found = [line for line in lines if line.startswith(f"weft:{name}{{") and f'key="{key}"' in line]
    return float(found[0].rpartition(" ")[2]) if found else 0.0


def test_the_usage_of_a_key_is_in_the_metrics(keys: Server) -> None:
    requests, tokens = (used(keys, "mate-1", name) for name in ("key_requests_total", "key_tokens_total"))
    assert ask(keys, "mate-1", [7] * 10, max_tokens=5).status_code == 200
    assert used(keys, "mate-1", "key_requests_total") == requests + 1
    assert used(keys, "mate-1", "key_tokens_total") == tokens + 15


def test_the_usage_of_a_key_is_shown_only_to_itself_and_to_operators(keys: Server) -> None:
    for name in ("mate-1", "mate-2"):
        assert ask(keys, name).status_code == 200

    def seen_by(key: str) -> set[str]:
        text = keys.client.get("/metrics", headers={"Authorization": f"Bearer {key}"}).text
        assert "weft:generation_tokens_total{" in text, "every key sees the totals"
        return set(re.findall(r'weft:key_(?:requests|tokens)_total{.*key="([^"]+)"', text))

    assert seen_by("mate-1") == {"mate-1"}
    assert seen_by("mate-2") == {"mate-2"}
    assert seen_by("operator") >= {"mate-1", "mate-2"}


def test_a_key_may_use_critical_only_if_it_was_granted(keys: Server) -> None:
    for priority in ("critical", 3, "high"):
        refused = ask(keys, "mate-1", priority=priority)
        assert refused.status_code == 403 and refused.json()["error"]["code"] == "priority_not_allowed"
    assert ask(keys, "operator", priority="critical").status_code == 200


def test_without_keys_every_priority_is_allowed(server: Server) -> None:
    assert server.complete(priority="critical").status_code == 200


@pytest.mark.parametrize("field", ["session_id", "cache_salt"])
@pytest.mark.parametrize("length", [257, 8 << 20])
def test_a_session_id_or_salt_that_is_too_long_is_refused_with_both_lengths(
    keys: Server, server: Server, field: str, length: int
) -> None:
    for refused in (ask(keys, "tenant", **{field: "x" * length}), server.complete(**{field: "x" * length})):
        error = refused.json()["error"]
        assert refused.status_code == 400 and error["param"] == field
        assert f"{length} characters; allowed: at most 256" in error["message"]
    assert server.complete(**{field: "x" * 256}).status_code == 200


def test_tokens_generated_before_a_deadline_are_charged_and_counted(keys: Server) -> None:
    for deadline in (0.2, 1, 5, 25):  # until it is long enough for two tokens on this machine
        paid, generated = used(keys, "mate-1", "key_tokens_total"), keys.metric("generation_tokens_total")
        stream = ask(keys, "mate-1", [7] * 10, max_tokens=8000, deadline=deadline, stream=True)
        received = stream.text.count("data: ") - 1
        if received > 1:
            break
    assert '"code":"deadline_exceeded"' in stream.text and received > 1
    assert used(keys, "mate-1", "key_tokens_total") - paid >= 10 + received
    assert keys.metric("generation_tokens_total") - generated >= received
    paid = used(keys, "mate-1", "key_tokens_total")
    assert ask(keys, "mate-1", [7] * 10, max_tokens=-1).status_code == 400
    assert used(keys, "mate-1", "key_tokens_total") == paid, "a refused request is charged nothing"


def test_tokens_generated_for_a_disconnected_client_are_counted(keys: Server) -> None:
    generated = keys.metric("generation_tokens_total")
    with open_stream(keys, "mate-1") as connection:
        assert connection.recv(1 << 10)
    keys.wait_until_free()
    assert keys.metric("generation_tokens_total") > generated


def test_every_failed_request_is_counted_by_its_status(keys: Server) -> None:
    def failures() -> dict[str, float]:
        lines = keys.client.get("/metrics").text.splitlines()
        found = [line for line in lines if line.startswith("weft:request_failure_total{")]
        return {line.partition('status="')[2][:3]: float(line.rpartition(" ")[2]) for line in found}

    before = failures()
    assert ask(keys, "unknown").status_code == 401
    assert ask(keys, "tenant", priority="high").status_code == 403
    assert keys.client.get("/nothing").status_code == 404
    assert keys.client.get("/v1/completions").status_code == 405
    assert keys.client.post("/v1/completions", content=b"x" * (17 << 20)).status_code == 413
    grown = {status: count - before.get(status, 0) for status, count in failures().items()}
    assert {status: count for status, count in grown.items() if count} == {
        "401": 1,
        "403": 1,
        "404": 1,
        "405": 1,
        "413": 1,
    }


def test_the_request_list_has_the_id_that_the_client_sent(keys: Server) -> None:
    body = json.dumps(LONG).encode()
    with socket.create_connection(("127.0.0.1", keys.port), timeout=60) as connection:
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer tenant\r\n"
        connection.sendall(f"{head}X-Request-Id: mine\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        wait_for(lambda: keys.client.get("/admin/requests").json()["data"])
        (one,) = keys.client.get("/admin/requests").json()["data"]
        assert one["request_id"] == "mine" != one["id"]


@pytest.fixture(scope="module")
def narrow(default_model_path: Path) -> Iterator[Server]:
    """A server that runs one answer at a time, with two keys."""
    keys = [api_key("flood"), api_key("calm", admin=True)]
    with running_server(
        default_model_path,
        backend_options=SLOW,
        engine={"scheduler": {"max_running": 1}},
        api_keys=keys,
        headers={"Authorization": "Bearer calm"},
    ) as server:
        yield server


def test_a_flood_of_one_key_does_not_delay_another_key(narrow: Server) -> None:
    """Five sequential requests of the second key, against two hundred of the first."""
    connections = [open_stream(narrow, "flood", max_tokens=8, stream=False) for _ in range(200)]

    def num_left() -> int:
        return sum(one["key"] == "flood" for one in narrow.client.get("/admin/requests").json()["data"])

    def num_answered() -> int:
        lines = narrow.client.get("/metrics").text.splitlines()
        found = [
            line for line in lines if line.startswith("weft:key_requests_total{") and 'key="flood"' in line
        ]
        return int(float(found[0].rpartition(" ")[2])) if found else 0

    wait_for(lambda: num_left() + num_answered() == 200)
    for _ in range(5):
        answer = ask(narrow, "calm", max_tokens=2)
        assert answer.status_code == 200
        assert answer.json()["choices"][0]["timings"]["queue"] > 0
    # In FIFO order the first of the five would have waited for all two hundred.
    assert num_left() > 100
    for connection in connections:
        connection.close()
    narrow.wait_until_free()


def under_way(server: Server, key: str) -> list[dict[str, Any]]:
    return [one for one in server.client.get("/admin/requests").json()["data"] if one["key"] == key]


@pytest.fixture(scope="module")
def wide(default_model_path: Path) -> Iterator[Server]:
    """A server that runs sixteen answers at a time, with two keys."""
    keys = [api_key("flood"), api_key("calm", admin=True)]
    with running_server(
        default_model_path,
        backend_options=SLOW,
        engine={"scheduler": {"max_running": 16}},
        api_keys=keys,
        headers={"Authorization": "Bearer calm"},
    ) as server:
        yield server


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_for_a_thousand_answers_does_not_delay_another_key(wide: Server, stream: bool) -> None:
    """In FIFO order the second key would wait for a thousand answers of 500 tokens each."""
    body = {"prompt": ["x"] * 8, "n": 128, "max_tokens": 500, "stream": stream}
    with open_stream(wide, "flood", **body):
        wait_for(lambda: wide.metric("num_requests_running") >= 15)
        for _ in range(5):
            assert ask(wide, "calm", max_tokens=2).status_code == 200
        assert wide.metric("num_requests_held") > 900
        (flood,) = under_way(wide, "flood")
        assert flood["completion_tokens"] < 16 * 500
    wide.wait_until_free()


@pytest.mark.parametrize("stream", [True, False])
def test_38_a_disconnect_while_some_answers_wait_removes_the_request(wide: Server, stream: bool) -> None:
    with open_stream(wide, "flood", n=40, stream=stream):
        wait_for(lambda: wide.metric("num_requests_held") == 25)
    wide.wait_until_free()
    assert wide.metric("num_requests_held") == 0
    assert ask(wide, "flood").status_code == 200


def test_a_deadline_applies_to_answers_that_still_wait(wide: Server) -> None:
    late = ask(wide, "flood", n=40, max_tokens=8000, deadline=0.5)
    assert late.status_code == 504 and late.json()["error"]["code"] == "deadline_exceeded"
    wide.wait_until_free()


def test_answers_released_one_by_one_equal_those_released_together(wide: Server, server: Server) -> None:
    """Compares seeds by index, the order of answers, usage, and the logprobs of the prompt."""
    body = {
        "prompt": ["one two three", [5, 6, 7]],
        "n": 30,
        "seed": 7,
        "max_tokens": 6,
        "logprobs": 1,
        "echo": True,
    }
    held, together = (one.client.post("/v1/completions", json=body).json() for one in (wide, server))
    assert held["usage"]["completion_tokens"] == together["usage"]["completion_tokens"]
    assert held["usage"]["prompt_tokens"] == together["usage"]["prompt_tokens"]
    for one, other in zip(held["choices"], together["choices"], strict=True):
        assert (one["index"], one["text"], one["finish_reason"]) == (other["index"], other["text"], "length")
        assert one["logprobs"]["tokens"] == other["logprobs"]["tokens"]
        # The logprobs of the noop backend differ between processes.
        assert (
            one["logprobs"]["token_logprobs"][0] is None and None not in one["logprobs"]["token_logprobs"][1:]
        )


@pytest.mark.parametrize("stream", [True, False])
def test_38_a_disconnect_while_a_request_waits_at_the_gate_removes_it(narrow: Server, stream: bool) -> None:
    with open_stream(narrow, "flood"):
        wait_for(lambda: narrow.metric("num_requests_running") == 1)
        waiting = open_stream(narrow, "flood", stream=stream)
        wait_for(lambda: narrow.metric("num_requests_held") == 1)
        assert narrow.metric("num_requests_waiting") == 1
        waiting.close()
        wait_for(lambda: narrow.metric("num_requests_held") == 0)
        assert narrow.metric("http_requests_open") == 1
    narrow.wait_until_free()


def test_a_deadline_applies_while_a_request_waits_at_the_gate(narrow: Server) -> None:
    with open_stream(narrow, "flood"):
        wait_for(lambda: narrow.metric("num_requests_running") == 1)
        late = ask(narrow, "calm", deadline=0.2)
        assert late.status_code == 504 and late.json()["error"]["code"] == "deadline_exceeded"
    narrow.wait_until_free()


def test_40_a_request_that_waits_at_the_gate_survives_an_engine_restart(narrow: Server) -> None:
    with open_stream(narrow, "flood"), ThreadPoolExecutor(1) as threads:
        wait_for(lambda: narrow.metric("num_requests_running") == 1)
        waiting = threads.submit(ask, narrow, "calm")
        headers = {"Authorization": "Bearer calm"}
        with httpx.Client(base_url=narrow.url, headers=headers, timeout=60) as client:
            wait_for(lambda: len(client.get("/admin/requests").json()["data"]) == 2)
        os.kill(narrow.engine_pid(), signal.SIGKILL)
        assert waiting.result(60).status_code == 200
    narrow.wait_until_free()


def test_a_stream_that_waits_at_the_gate_has_sent_its_headers(narrow: Server) -> None:
    with open_stream(narrow, "flood") as running:
        wait_for(lambda: narrow.metric("num_requests_running") == 1)
        with open_stream(narrow, "calm", max_tokens=2) as waiting:
            assert waiting.recv(12) == b"HTTP/1.1 200"
            assert narrow.metric("num_requests_held") == 1
            running.close()
            received = b""
            while b"[DONE]" not in received:
                part = waiting.recv(65536)
                assert part, received
                received += part
    narrow.wait_until_free()


def test_39_a_flood_of_one_key_leaves_capacity_for_other_keys(default_model_path: Path) -> None:
    keys, headers = [api_key("flood"), api_key("calm")], {"Authorization": "Bearer calm"}
    with running_server(
        default_model_path, backend_options=SLOW, api_keys=keys, max_requests=10, headers=headers
    ) as server:
        connections = [open_stream(server, "flood") for _ in range(12)]
        wait_for(lambda: server.metric("request_failure_total") == 4)
        assert server.metric("http_requests_open") == 8
        refused = ask(server, "flood")
        assert refused.status_code == 429 and refused.json()["error"]["code"] == "queue_full"
        assert int(refused.headers["retry-after"]) > 1  # eight requests are ahead, and none ended recently
        assert ask(server, "calm").status_code == 200
        for connection in connections:
            connection.close()
        server.wait_until_free()


def test_two_keys_do_not_wait_for_each_other_while_the_engine_has_capacity(keys: Server) -> None:
    with open_stream(keys, "tenant"), open_stream(keys, "operator"):
        wait_for(lambda: keys.metric("num_requests_running") == 2)
        assert keys.metric("num_requests_held") == 0


def test_40_no_answer_is_released_while_the_engine_is_down(default_model_path: Path) -> None:
    """Earlier, the reserved slots of a dead engine were released to requests, which then failed."""
    keys = [api_key("flood"), api_key("calm", admin=True)]
    with (
        running_server(
            default_model_path,
            backend_options=SLOW,
            engine={"scheduler": {"max_running": 16}},
            api_keys=keys,
            headers={"Authorization": "Bearer calm"},
        ) as server,
        ThreadPoolExecutor(8) as threads,
    ):
        flood = [open_stream(server, "flood", stream=False) for _ in range(17)]
        wait_for(lambda: server.metric("num_requests_running") == 15)
        engine = server.engine_pid()
        long = open_stream(server, "calm", stream=False)  # takes the reserved slot
        wait_for(lambda: server.metric("num_requests_running") == 16)
        waiting = [threads.submit(ask, server, "calm") for _ in range(4)]
        wait_for(lambda: server.metric("num_requests_held") == 6)
        os.kill(engine, signal.SIGKILL)
        assert [one.result(60).status_code for one in waiting] == [200] * 4
        for connection in (*flood, long):
            connection.close()
        server.wait_until_free()
