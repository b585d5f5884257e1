"""Answers with many logprobs: they do not block the event loop, their memory is limited and freed, and too large ones
are refused."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from in_process import in_process
from loop_callbacks import reference_seconds
from server_process import MESSAGES, NOOP, running_server, wait_for
from test_server_life import send_request

MIB = 1 << 20
CHAT: dict[str, Any] = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 20, "ignore_eos": True}
COMPLETION: dict[str, Any] = {"prompt": [5, 6, 7], "logprobs": 20, "ignore_eos": True}


@contextmanager
def longest_callback() -> Iterator[list[float]]:
    """The longest callback of the event loop, in CPU seconds."""
    longest, run = [0.0], asyncio.Handle._run

    def timed(handle: asyncio.Handle) -> None:
        began = time.thread_time()
        run(handle)
        longest[0] = max(longest[0], time.thread_time() - began)

    gc.collect()
    gc.disable()  # a collection would visit the objects of all tests
    asyncio.Handle._run = timed  # type: ignore[method-assign]
    try:
        yield longest
    finally:
        asyncio.Handle._run = run  # type: ignore[method-assign]
        gc.enable()


@pytest.mark.parametrize(
    ("path", "fields"), [("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)]
)
def test_an_answer_with_many_logprobs_never_blocks_the_event_loop(
    default_model_path: Path, path: str, fields: dict[str, Any]
) -> None:
    async def run() -> float:
        async with in_process(default_model_path, max_context=256) as server:
            small = json.dumps({**fields, "max_tokens": 2}).encode()
            assert (await server.send(path, small)).status == 200  # warm-up
            with longest_callback() as longest:
                body = json.dumps({**fields, "n": 128, "max_tokens": 150}).encode()
                reply = await server.send(path, body)
                await asyncio.sleep(0)  # the callback of the last message has ended and is counted
            assert reply.status == 200 and len(json.loads(reply.body)["choices"]) == 128
            return longest[0]

    before = reference_seconds()
    seconds = asyncio.run(run())
    references = seconds / max(before, reference_seconds())
    assert references < 6, "the whole answer takes several times as long"


def resident(pid: int, name: str = "VmRSS") -> float:
    """Resident memory of a process in MiB; with VmHWM, its peak."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


@pytest.mark.parametrize("stream", [False, True])
def test_many_logprobs_take_no_more_memory_than_their_json_and_it_is_freed(
    default_model_path: Path, stream: bool
) -> None:
    """32,000 tokens with 20 logprobs each are 50 MB of JSON. As objects they took 200 MiB in the server and 90 MiB in
    the engine."""
    with running_server(default_model_path) as server:
        assert server.chat(logprobs=True, top_logprobs=20).status_code == 200
        http, engine = server.process.pid, server.engine_pid()
        before = resident(http), resident(engine)
        fields = {**CHAT, "n": 64, "max_tokens": 500, "stream": stream}
        num_bytes = 0
        with server.client.stream("POST", "/v1/chat/completions", json=fields) as response:
            assert response.status_code == 200
            for part in response.iter_raw():
                num_bytes += len(part)
        assert num_bytes > 40_000_000
        assert resident(http, "VmHWM") - before[0] < (40 if stream else 120)
        assert resident(engine, "VmHWM") - before[1] < 40
        wait_for(lambda: resident(http) - before[0] < 30)
        server.wait_until_free()


def code_of(response: Any) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


def test_an_answer_that_cannot_fit_is_refused_before_anything_is_computed(default_model_path: Path) -> None:
    with running_server(default_model_path) as server:
        refused = server.chat(**CHAT, n=128, max_tokens=2000)
        assert code_of(refused) == (413, "answer_too_large")
        allowed, fields = 64 * MIB, int(re.findall(r"would have (\d+) bytes", refused.text)[0])
        assert str(allowed) in refused.text and fields > allowed
        assert server.metric("generation_tokens_total") == 0
        assert server.chat(**CHAT, n=2, max_tokens=20).status_code == 200
        # The context limits the answer, not max_tokens.
        assert server.complete([5] * 8180, max_tokens=100_000_000, ignore_eos=True).status_code == 200


def test_an_answer_that_grows_too_large_is_ended(default_model_path: Path) -> None:
    """Without max_tokens the size is unknown in advance."""
    with running_server(default_model_path, max_answer_bytes=MIB) as server:
        refused = server.chat(**CHAT, max_tokens=None)
        assert code_of(refused) == (413, "answer_too_large")
        server.wait_until_free()
        assert server.metric("generation_tokens_total") < 4000
        assert server.chat(**CHAT, max_tokens=20).status_code == 200


WITH_LOGPROBS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x", "logprobs": 20, "max_tokens": 4000, "ignore_eos": True},
    "/v1/responses": {
        "input": "x",
        "top_logprobs": 20,
        "include": ["message.output_text.logprobs"],
        "ignore_eos": True,
    },
    "/api/chat": {
        "messages": [{"role": "user", "content": "x"}],
        "logprobs": True,
        "top_logprobs": 20,
        "options": {"num_predict": -1},
        "stream": False,
    },
}


def test_answers_of_every_api_count_and_are_ended_when_they_are_too_large(default_model_path: Path) -> None:
    with running_server(default_model_path, max_answer_bytes=MIB // 8) as server:
        for path, fields in WITH_LOGPROBS.items():
            before = server.metric("generation_tokens_total")
            refused = server.client.post(path, json=fields)
            assert refused.status_code == 413 and "max_answer_bytes" in refused.text, (
                path,
                refused.text[:200],
            )
            server.wait_until_free()
            assert server.metric("generation_tokens_total") - before < 1000, path


def test_answers_that_are_too_large_together_get_a_429_and_small_ones_continue(
    default_model_path: Path,
) -> None:
    with running_server(default_model_path, max_buffered_answer_bytes=MIB) as server:
        refused = server.chat(**CHAT, n=4, max_tokens=500)
        assert code_of(refused) == (429, "server_busy")
        assert int(refused.headers["retry-after"]) >= 1
        server.wait_until_free()
        assert server.chat(**CHAT, max_tokens=20).status_code == 200
        # The bytes are released at the end of each request, so they do not accumulate.
        for _ in range(5):
            assert server.chat(**CHAT, n=4, max_tokens=100).status_code == 200


def test_only_the_unsent_bytes_of_a_stream_count(default_model_path: Path) -> None:
    settings: dict[str, Any] = {
        "max_answer_bytes": 2 * MIB,
        "engine": {"stream_buffer": 1_000_000},
        # Slower than the server and the client on any machine, so only a client that does not read falls behind.
        "backend_options": {**NOOP, "seconds_per_step": 0.004},
    }
    with running_server(default_model_path, **settings) as server:
        fields: dict[str, Any] = {"prompt": [1], "logprobs": 20, "ignore_eos": True, "stream": True}
        received = b""
        with server.client.stream(
            "POST", "/v1/completions", json={**fields, "n": 8, "max_tokens": 1000}
        ) as response:
            for part in response.iter_raw():
                received = received[-100:] + part
        assert b"[DONE]" in received
        connection = send_request(server, receive_buffer=4096, **fields, n=16, max_tokens=2000)
        connection.recv(1, socket.MSG_PEEK)
        wait_for(lambda: not server.metric("num_requests_running"))  # the client does not read
        received = b""
        while part := connection.recv(1 << 20):
            received += part
            if b"\r\n0\r\n" in part[-16:]:
                break
        connection.close()
        assert b'"code":"answer_too_large"' in received and b"[DONE]" not in received
        server.wait_until_free()


def test_the_logprobs_of_an_echoed_prompt_come_before_those_of_each_answer(
    default_model_path: Path,
) -> None:
    with running_server(default_model_path) as server:
        prompt = "One two three four five six seven. " * 40
        plain = server.complete(prompt, echo=True, n=2, max_tokens=5, seed=1).json()
        scored = server.complete(prompt, echo=True, n=2, max_tokens=5, seed=1, logprobs=2).json()
        num_prompt = scored["usage"]["prompt_tokens"]
        assert num_prompt > 200  # the engine reports them in several messages
        first, second = (choice["logprobs"] for choice in scored["choices"])
        for choice, other, logprobs in zip(scored["choices"], plain["choices"], (first, second), strict=True):
            assert choice["text"] == other["text"]
            lengths = [
                len(logprobs[name]) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
            ]
            assert lengths == [num_prompt + 5] * 4
            assert [
                position for position, value in enumerate(logprobs["token_logprobs"]) if value is None
            ] == [0]
            starts = zip(logprobs["tokens"], logprobs["text_offset"], strict=True)
            assert all(choice["text"].startswith(token, at) for token, at in starts if "bytes:" not in token)
        assert {name: values[:num_prompt] for name, values in first.items()} == {
            name: values[:num_prompt] for name, values in second.items()
        }
