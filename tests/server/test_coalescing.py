"""Identical requests in flight, over a real server and its engine process: computed once, the same bytes for all, and each
with its own end.

A stopped engine process holds requests for as long as a test needs.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_process import SLOW, Server, api_key, running_server, wait_for

LONG = {"prompt": "Tell me more", "seed": 1, "stream": True, "max_tokens": 7000, "ignore_eos": True}
"""A stream that outlives the test. With a seed, because the noop backend draws greedy tokens too."""


@pytest.fixture(scope="module")
def server(default_model_path: Path) -> Iterator[Server]:
    with running_server(default_model_path, backend_options=SLOW) as running:
        yield running


def coalesced(server: Server) -> float:
    """Readable while the engine is stopped too."""
    lines = server.client.get("/metrics").text.splitlines()
    [line] = [line for line in lines if line.startswith("weft:requests_coalesced_total{")]
    return float(line.rpartition(" ")[2])


@contextmanager
def stopped_engine(server: Server) -> Iterator[None]:
    engine = server.engine_pid()
    os.kill(engine, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(engine, signal.SIGCONT)


def headers_of(key: str | None) -> dict[str, str]:
    return {} if key is None else {"authorization": f"Bearer {key}"}


def ask(server: Server, key: str | None = None, **fields: Any) -> dict[str, Any]:
    """The answer, without its times."""
    with httpx.Client(base_url=server.url, timeout=60, headers=headers_of(key)) as client:
        reply = client.post("/v1/completions", json=fields)
    assert reply.status_code == 200, reply.text
    body: dict[str, Any] = reply.json()
    for choice in body["choices"]:
        del choice["timings"]
    return body


def ask_together(server: Server, count: int, keys: Sequence[str] = (), **fields: Any) -> list[dict[str, Any]]:
    """Equal requests that are all in flight before the engine sees any of them. `keys`: the key of each."""
    before = coalesced(server)
    with ThreadPoolExecutor(count) as threads, stopped_engine(server):
        pending = [threads.submit(ask, server, key, **fields) for key in keys or [None] * count]
        wait_for(lambda: coalesced(server) == before + count - 1)
    return [one.result() for one in pending]


class Stream:
    """The events of a streamed completion."""

    def __init__(self, server: Server, stack: ExitStack, key: str | None = None, **fields: Any) -> None:
        client = stack.enter_context(httpx.Client(base_url=server.url, timeout=60, headers=headers_of(key)))
        self._response = client.stream("POST", "/v1/completions", json={**LONG, **fields})
        self._lines = self._response.__enter__().iter_lines()
        self.text = ""

    def read(self, length: int) -> str:
        """The first characters of the answer."""
        while len(self.text) < length:
            event = self.next_event()
            self.text += "".join(one["text"] for one in event["choices"])
        return self.text[:length]

    def next_event(self) -> dict[str, Any]:
        event: dict[str, Any] = json.loads(next(line for line in self._lines if line)[6:])
        return event

    def leave(self) -> None:
        self._response.__exit__(None, None, None)


@pytest.mark.parametrize(
    "fields",
    [{"temperature": 0}, {"temperature": 0.9}, {"temperature": 0, "logprobs": 3}],
    ids=["greedy", "sampled", "logprobs"],
)
def test_55_equal_requests_are_computed_once(server: Server, fields: dict[str, Any]) -> None:
    body = {"prompt": "One two three", "max_tokens": 12, "ignore_eos": True, "seed": 5, **fields}
    alone = ask(server, **body)
    names = ("step_tokens_total", "tokens_coalesced_total", "generation_tokens_total")
    before = server.metrics(*names)
    answers = ask_together(server, 6, **body)
    server.wait_until_free()
    steps, saved, generated = (b - a for a, b in zip(before, server.metrics(*names), strict=True))
    assert steps <= answers[0]["usage"]["prompt_tokens"] + 12, "one prompt and one answer were computed"
    assert (saved, generated) == (5 * 12, 6 * 12)
    for answer in answers:
        assert answer["choices"] == alone["choices"]
        assert answer["usage"]["completion_tokens"] == 12
        assert answer["usage"]["prompt_tokens"] == alone["usage"]["prompt_tokens"]
    assert len({answer["id"] for answer in answers}) == 6


def test_55_a_stop_string_cuts_every_reader_at_the_same_place(server: Server) -> None:
    body = {"prompt": "Stop here", "max_tokens": 60, "seed": 5, "ignore_eos": True}
    text = ask(server, **body)["choices"][0]["text"]
    stop = text[len(text) // 2 :][:6]
    alone = ask(server, **body, stop=[stop])
    assert (
        alone["choices"][0]["finish_reason"] == "stop"
        and alone["choices"][0]["text"] == text[: text.index(stop)]
    )
    for answer in ask_together(server, 4, **body, stop=[stop]):
        assert answer["choices"] == alone["choices"]
        assert answer["usage"]["completion_tokens"] == alone["usage"]["completion_tokens"]
    server.wait_until_free()


def test_55_a_late_reader_gets_the_same_bytes_and_goes_on_when_the_first_one_leaves(server: Server) -> None:
    before = coalesced(server)
    with ExitStack() as stack:
        first = Stream(server, stack)
        first.read(40)
        late = Stream(server, stack)
        last = Stream(server, stack)
        wait_for(lambda: coalesced(server) == before + 2)
        text = first.read(200)
        assert late.read(200) == text
        first.leave()
        wait_for(lambda: server.metric("http_requests_open") == 2)
        longer = late.read(400)
        assert longer.startswith(text)
        late.leave()
        assert last.read(600).startswith(longer)
        assert server.metric("num_requests_running") == 1
        last.leave()
        server.wait_until_free()


def test_55_the_deadline_of_one_reader_leaves_the_others(server: Server) -> None:
    with ExitStack() as stack:
        first = Stream(server, stack, prompt="A deadline", deadline=4)
        first.read(10)
        other = Stream(server, stack, prompt="A deadline")
        before = coalesced(server)
        other.read(10)
        while "error" not in (event := first.next_event()):
            pass
        assert event["error"]["code"] == "deadline_exceeded"
        length = len(other.text)
        assert len(other.read(length + 50)) == length + 50
        assert coalesced(server) == before
        other.leave()
        server.wait_until_free()


@pytest.mark.parametrize(
    "other", [{"temperature": 0.9, "seed": 2}, {"max_tokens": 6999}, {"prompt": "Tell me"}]
)
def test_55_requests_that_differ_are_computed_each(server: Server, other: dict[str, Any]) -> None:
    before = coalesced(server)
    with ExitStack() as stack:
        streams = [Stream(server, stack), Stream(server, stack, **other)]
        for stream in streams:
            stream.read(10)
        assert server.metric("num_requests_running") == 2 and coalesced(server) == before
        for stream in streams:
            stream.leave()
        server.wait_until_free()


def test_55_keys_share_only_where_they_share_a_cache_salt(default_model_path: Path) -> None:
    keys = [api_key("a"), api_key("b"), api_key("c", cache_salt="team"), api_key("d", cache_salt="team")]
    headers = {"authorization": "Bearer a"}
    streams: list[Stream] = []
    with (
        running_server(default_model_path, backend_options=SLOW, api_keys=keys, headers=headers) as server,
        ExitStack() as stack,
    ):
        for key, running, shared in (("a", 1, 0), ("b", 2, 0), ("c", 3, 0), ("d", 3, 1), ("a", 3, 2)):
            streams.append(Stream(server, stack, key))
            streams[-1].read(10)
            assert server.metrics("num_requests_running", "requests_coalesced_total") == [running, shared]


@pytest.fixture(scope="module")
def team(default_model_path: Path) -> Iterator[Server]:
    """A server with keys that share a cache salt. Tests read metrics with the key of the operator."""
    keys = [
        api_key("operator", admin=True),
        *(api_key(name, cache_salt="team") for name in ("one", "two")),
        api_key("poor", cache_salt="team", tokens_per_minute=24),
        api_key("single", cache_salt="team", concurrent=1),
    ]
    headers = headers_of("operator")
    with running_server(default_model_path, backend_options=SLOW, api_keys=keys, headers=headers) as running:
        yield running


def used(server: Server, key: str) -> float:
    """The tokens that a key was charged."""
    lines = server.client.get("/metrics").text.splitlines()
    start = f'weft:key_tokens_total{{key="{key}"'
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(start))


def test_each_key_of_joined_requests_is_charged_its_prompt_and_its_answer(team: Server) -> None:
    body = {"prompt": [5] * 10, "max_tokens": 12, "ignore_eos": True, "seed": 5}
    keys = ("one", "two", "two")
    before = [used(team, key) for key in ("one", "two", "operator")]
    computed = team.metric("step_tokens_total")
    answers = ask_together(team, len(keys), keys, **body)
    team.wait_until_free()
    assert all(answer["choices"] == answers[0]["choices"] for answer in answers)
    assert team.metric("step_tokens_total") - computed <= 10 + 12, "one prompt and one answer were computed"
    after = [used(team, key) for key in ("one", "two", "operator")]
    assert [b - a for a, b in zip(before, after, strict=True)] == [22, 2 * 22, 0]


def test_a_joined_request_takes_tokens_of_the_rate_of_its_key(team: Server) -> None:
    body = {"prompt": [6] * 10, "max_tokens": 12, "ignore_eos": True, "seed": 5}
    ask_together(team, 2, ("one", "poor"), **body)
    refused = team.client.post("/v1/completions", json=body, headers=headers_of("poor"))
    assert refused.status_code == 429 and "needs 22" in refused.json()["error"]["message"]
    assert ask(team, "one", **body)["usage"]["completion_tokens"] == 12
    team.wait_until_free()


def test_joined_requests_count_for_the_limit_of_concurrent_requests(team: Server) -> None:
    before = coalesced(team)
    with ExitStack() as stack:
        first = Stream(team, stack, "one")
        text = first.read(20)
        joined = Stream(team, stack, "single")
        assert joined.read(20) == text and coalesced(team) == before + 1
        refused = team.client.post("/v1/completions", json=LONG, headers=headers_of("single"))
        assert refused.status_code == 429 and refused.json()["error"]["code"] == "rate_limit_exceeded"
        other = Stream(team, stack, "two")
        assert other.read(20) == text and coalesced(team) == before + 2
        joined.leave()
        wait_for(lambda: team.metric("http_requests_open") == 2)
        again = Stream(team, stack, "single")
        assert again.read(20) == text and coalesced(team) == before + 3
        for stream in (first, other, again):
            stream.leave()
        team.wait_until_free()


def test_55_coalescing_can_be_switched_off(default_model_path: Path) -> None:
    with (
        running_server(default_model_path, backend_options=SLOW, coalesce=False) as server,
        ExitStack() as stack,
    ):
        streams = [Stream(server, stack) for _ in range(2)]
        assert streams[0].read(80) == streams[1].read(80)
        assert server.metrics("num_requests_running", "requests_coalesced_total") == [2, 0]


def test_55_the_death_of_the_engine_ends_all_readers_of_a_sequence(default_model_path: Path) -> None:
    with running_server(default_model_path, backend_options=SLOW) as server, ExitStack() as stack:
        streams = [Stream(server, stack) for _ in range(3)]
        for stream in streams:
            stream.read(20)
        assert server.metrics("num_requests_running", "requests_coalesced_total") == [1, 2]
        os.kill(server.engine_pid(), signal.SIGKILL)
        for stream in streams:
            while "error" not in (event := stream.next_event()):
                pass
            assert event["error"]["code"] == "engine_died"
        wait_for(lambda: server.client.get("/ready").status_code == 200)
        assert server.complete(temperature=0).status_code == 200
        again = [Stream(server, stack) for _ in range(2)]
        assert again[0].read(50) == again[1].read(50)
        assert server.metric("requests_coalesced_total") == 3


def test_55_the_real_model_gives_shared_and_own_answers_with_the_same_bytes(default_model_path: Path) -> None:
    bodies: list[dict[str, Any]] = [
        {"prompt": "The capital of France is", "max_tokens": 16, "temperature": 0},
        {"prompt": "Once upon a time", "max_tokens": 16, "temperature": 0.8, "seed": 7, "logprobs": 2},
    ]
    options = {"checkpoint": str(default_model_path), "threads": 1, "max_context": 256}
    real = {"backend": "cpu", "backend_options": options}
    with running_server(default_model_path, coalesce=False, **real) as server:
        own = [ask(server, **body)["choices"] for body in bodies]
    with running_server(default_model_path, **real) as server:
        for body, choices in zip(bodies, own, strict=True):
            assert [answer["choices"] for answer in ask_together(server, 5, **body)] == [choices] * 5
