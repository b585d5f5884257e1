"""Bodies that are large, numerous, slow to parse or compressed: each gets a response, and other requests are not
delayed."""

from __future__ import annotations

import gzip
import json
import socket
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_process import Server, running_server, wait_for

KINDS = {
    "numbers": ("/v1/completions", b'{"prompt":[' + b"1," * 3_000_000 + b"1]}"),
    "objects": ("/v1/chat/completions", b'{"messages":[' + b'{"a":1},' * 1_000_000 + b"{}]}"),
    "lists": ("/v1/completions", b'{"prompt":[' + b"[[[[]]]]," * 1_000_000 + b"[]]}"),
    "ids": ("/detokenize", b'{"tokens":[' + b"1," * 3_000_000 + b"1]}"),
}


def peak_memory(server: Server) -> int:
    lines = Path(f"/proc/{server.process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) << 10


def test_22_bodies_of_millions_of_values_are_refused_and_block_no_other_request(server: Server) -> None:
    padding = {"metadata": {"padding": "x" * 400_000}}
    assert server.complete(**padding).status_code == 200  # starts the worker process for large bodies
    before = peak_memory(server)
    answers: dict[str, httpx.Response] = {}

    def ask() -> None:
        with httpx.Client(base_url=server.url, timeout=60) as client:
            for name, (path, body) in KINDS.items():
                answers[name] = client.post(path, content=body)

    pending = threading.Thread(target=ask)
    pending.start()
    num_healthy = 0
    with httpx.Client(base_url=server.url, timeout=60) as client:
        while pending.is_alive():
            assert client.get("/health").status_code == 200
            num_healthy += 1
            time.sleep(0.005)
    pending.join()
    for answer in answers.values():
        message = answer.json()["error"]["message"]
        assert answer.status_code == 400 and ("262144" in message or "allowed: at most" in message)
    # A parser in the server process would let only a few health checks through per body.
    assert num_healthy > 40, num_healthy
    # Parsed in the server process, each body would take a quarter of a gigabyte.
    assert peak_memory(server) - before < 150 << 20


def test_a_large_body_is_parsed_like_a_small_one(server: Server) -> None:
    padding = {"metadata": {"padding": "x" * 400_000}, "bananas": 1}
    small = server.complete([5] * 20, seed=7).json()
    large = server.complete([5] * 20, seed=7, **padding)
    assert large.json()["choices"][0]["text"] == small["choices"][0]["text"]
    assert "bananas" in large.headers["warning"]
    refused = server.complete([5], temperature="warm", **padding)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "temperature"
    broken = server.client.post("/v1/completions", content=b'{"prompt": "' + b"x" * 400_000)
    assert broken.status_code == 400 and broken.json()["error"]["code"] == "invalid_json"


@pytest.mark.parametrize(
    "fields",
    [
        {"seed": 10**30},
        {"stop_token_ids": [-(10**30)]},
        {"metadata": {"number": 2**64}},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"maximum": 10**30}}}]},
        {"chat_template_kwargs": {"number": 10**30}},
    ],
)
def test_an_integer_of_more_than_64_bits_in_a_large_body_is_refused_with_its_field(
    server: Server, fields: dict[str, Any]
) -> None:
    """Such an integer does not fit a message between processes: the worker process died of it."""
    (name,) = fields
    refused = server.chat(user="x" * 300_000, **fields)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == name, refused.text


def test_08_a_large_body_may_be_nested_as_deeply_as_a_small_one_and_no_deeper(server: Server) -> None:
    for levels in range(960, 1010):
        nested = "[" * levels + "]" * levels
        padding = "x" * 300_000
        body = f'{{"prompt": [5], "max_tokens": 1, "metadata": {{"deep": {nested}, "padding": "{padding}"}}}}'
        response = server.client.post("/v1/completions", content=body)
        assert response.status_code in (200, 400), response.text


def test_a_large_body_of_a_client_that_disconnects_does_not_affect_the_next(server: Server) -> None:
    path, body = KINDS["objects"]
    for _ in range(3):
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
            connection.sendall(head.encode() + body)
    padding = {"metadata": {"padding": "x" * 400_000}}
    assert server.complete([5] * 20, **padding).status_code == 200


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "identity, gzip", "x" * 200])
def test_32_compressed_bodies_are_refused_and_not_decompressed(server: Server, encoding: str) -> None:
    before = peak_memory(server)
    bomb = gzip.compress(b"[" * (64 << 20)) if encoding != "deflate" else zlib.compress(b"[" * (64 << 20))
    answer = server.client.post("/v1/completions", content=bomb, headers={"Content-Encoding": encoding})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["code"] == "unsupported_encoding"
    assert encoding[:60] in error["message"] and "/" not in error["message"] and "0x" not in error["message"]
    assert peak_memory(server) - before < 16 << 20


def test_32_a_body_with_content_encoding_identity_is_accepted(server: Server) -> None:
    content = json.dumps({"prompt": "x", "max_tokens": 2}).encode()
    headers = {"Content-Encoding": "identity"}
    assert server.client.post("/v1/completions", content=content, headers=headers).status_code == 200


@pytest.fixture(scope="module")
def small_server(default_model_path: Path) -> Iterator[Server]:
    """A server with a limit of one megabyte for all bodies."""
    with running_server(default_model_path, max_buffered_bytes=1_000_000) as server:
        yield server


def test_02_all_bodies_together_have_a_limit_and_a_request_beyond_it_gets_retry_after(
    small_server: Server,
) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 600000\r\n\r\n"
    with socket.create_connection(("127.0.0.1", small_server.port)) as half:
        half.sendall(head + b" ")  # the rest is never sent
        body = {"prompt": "x", "max_tokens": 2, "metadata": {"padding": "x" * 600_000}}

        def is_refused() -> bool:
            answer = small_server.client.post("/v1/completions", json=body)
            if answer.status_code == 200:
                return False  # the first body has not been counted yet
            assert answer.status_code == 503 and answer.json()["error"]["code"] == "server_busy"
            assert "1000000" in answer.json()["error"]["message"] and int(answer.headers["retry-after"]) >= 1
            return True

        wait_for(is_refused)
        with socket.create_connection(("127.0.0.1", small_server.port)) as rest:
            rest.sendall(head.replace(b"600000", b"520000") + b" ")  # fills the budget
            assert small_server.complete("x").status_code == 200, "small bodies always fit"
    wait_for(lambda: small_server.client.post("/v1/completions", json=body).status_code == 200)


LONG = {"prompt": "x", "max_tokens": 8000, "ignore_eos": True, "n": 20, "stream": True}


def test_a_body_counts_only_until_it_is_tokenised(small_server: Server) -> None:
    padding = {"metadata": {"padding": "x" * 600_000}}
    with small_server.client.stream("POST", "/v1/completions", json={**LONG, **padding}) as running:
        assert running.status_code == 200
        assert small_server.client.post("/tokenize", json={"prompt": "x", **padding}).status_code == 200
        assert small_server.metric("http_requests_open") > 0, "the stream was still open"
    small_server.wait_until_free()


def test_39_retry_after_of_a_full_server_depends_on_the_active_requests(default_model_path: Path) -> None:
    with running_server(default_model_path, max_requests=4) as server, ExitStack() as streams:
        for _ in range(4):
            streams.enter_context(server.client.stream("POST", "/v1/completions", json=LONG))
        refused = server.complete()
        assert refused.status_code == 429
        # None has ended, so the lengths are guesses. The longest of 20 answers of up to 8,000 tokens is a long one.
        assert 60 < int(refused.headers["retry-after"]) <= 600
