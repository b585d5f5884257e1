"""Text work of large requests: it does not block the event loop, is fairly ordered, and is dropped after a
disconnect."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from in_process import in_process
from loop_callbacks import BODIES, CHAT, COMPLETION, MESSAGES, MOST_REFERENCES
from server_process import SLOW, Server, api_key, running_server, wait_for

from weft.server.http import bodies
from weft.server.text_work import prompt_tokens as prompts
from weft.server.text_work import worker


@pytest.fixture(scope="module")
def longest_callbacks(default_model_path: Path) -> dict[str, Any]:
    """The longest callback by the name of the body."""
    script = Path(__file__).with_name("loop_callbacks.py")
    done = subprocess.run(
        [sys.executable, str(script), str(default_model_path)],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "PYTHONPATH": str(script.parents[1])},
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


@pytest.mark.parametrize("name", BODIES)
def test_10_no_body_blocks_the_event_loop(longest_callbacks: dict[str, Any], name: str) -> None:
    longest = longest_callbacks[name]
    print(name, longest)
    assert longest["references"] < MOST_REFERENCES, longest


@pytest.fixture(scope="module")
def keys(default_model_path: Path) -> Iterator[Server]:
    """A server with limited keys and max_requests of 4."""
    found = [api_key("metered", tokens_per_minute=1000), api_key("single", concurrent=1), api_key("plain")]
    options = {"api_keys": found, "backend_options": SLOW, "max_requests": 4}
    with running_server(default_model_path, **options, headers=PLAIN) as server:
        yield server


PLAIN = {"Authorization": "Bearer plain"}
METERED = {"Authorization": "Bearer metered"}
SINGLE = {"Authorization": "Bearer single"}
LONG = {"prompt": "x", "max_tokens": 8000, "ignore_eos": True, "stream": True}


def test_10_tokenize_and_detokenize_use_the_token_limit_of_the_key(keys: Server) -> None:
    def ask(path: str, **fields: Any) -> httpx.Response:
        return keys.client.post(path, json=fields, headers=METERED)

    def left(answer: httpx.Response) -> int:
        return int(answer.headers["x-ratelimit-remaining-tokens"])

    # The body of 1,600 bytes reserves about 400 tokens. The request costs only those that it has.
    dense = ask("/tokenize", prompt="=" * 1600)
    assert left(dense) >= 1000 - len(dense.json()["tokens"]) > 900
    first = ask("/tokenize", prompt="word " * 100)
    tokens = first.json()["tokens"]
    # One token is refilled per 0.06 s; allow for a slow machine.
    assert first.status_code == 200 and 100 <= len(tokens) <= 1000 - left(first) + 50
    second = ask("/detokenize", tokens=tokens)
    assert second.status_code == 200 and left(second) < left(first)
    refused = ask("/detokenize", tokens=[10**6] * 500)
    assert refused.status_code == 400 and left(refused) >= left(second), "refused requests cost nothing"
    assert ask("/tokenize", prompt="x", messages=[]).status_code == 400
    # A request for more than the bucket holds needs a full bucket.
    late = ask("/tokenize", prompt="word " * 2000)
    assert late.status_code == 429 and late.json()["error"]["code"] == "rate_limit_exceeded"
    assert int(late.headers["retry-after"]) >= 1


def test_10_tokenize_and_detokenize_count_as_active_requests(keys: Server) -> None:
    fields: dict[str, Any]
    with ExitStack() as streams:
        streams.enter_context(keys.client.stream("POST", "/v1/completions", json=LONG, headers=SINGLE))
        for path, fields in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [5]})):
            refused = keys.client.post(path, json=fields, headers=SINGLE)
            assert refused.status_code == 429 and refused.json()["error"]["code"] == "rate_limit_exceeded"
            assert keys.client.post(path, json=fields).status_code == 200
        for _ in range(3):
            streams.enter_context(keys.client.stream("POST", "/v1/completions", json=LONG))
        for path, fields in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [5]})):
            refused = keys.client.post(path, json=fields, headers=METERED)
            assert refused.status_code == 429 and refused.json()["error"]["code"] == "queue_full"
    keys.wait_until_free()


def test_10_a_prompt_of_9_kb_does_not_wait_for_many_of_500_kb(server: Server) -> None:
    short, long = {"prompt": "word " * 1800}, {"prompt": "A quick brown fox. " * 26_000}

    def ask(body: dict[str, Any]) -> int:
        with httpx.Client(base_url=server.url, timeout=120) as client:
            return client.post("/tokenize", json=body).status_code

    with ThreadPoolExecutor(24) as pool:
        for body in (short, long):  # starts both processes
            assert set(pool.map(ask, [body] * 4)) == {
                200 if body is short else 400
            }  # longer than the context of 8192
        pending = [pool.submit(ask, long) for _ in range(20)]
        wait_for(lambda: any(one.done() for one in pending))
        num_done = sum(one.done() for one in pending)
        assert ask(short) == 200
        num_overtaken = 20 - sum(one.done() for one in pending)
        assert num_overtaken >= 20 - num_done - 6, "it waited for at most a few of the long ones"
        assert {one.result() for one in pending} == {400}


STAGES: dict[str, tuple[str, str, bytes]] = {
    "body": ("weft.server.http.bodies", COMPLETION, b'{"prompt":[' + b"1," * 200_000 + b"1]}"),
    "text": (
        "weft.server.text_work.text_process",
        "/tokenize",
        json.dumps({"prompt": "A fox. " * 70_000}).encode(),
    ),
    **{
        f"template, {path}": (
            "weft.server.text_work.text_process",
            path,
            json.dumps({field: [{"role": "user", "content": "A fox. " * 5}] * 4000}).encode(),
        )
        for path, field in (
            (CHAT, "messages"),
            ("/v1/messages/count_tokens", "messages"),
            ("/v1/responses", "input"),
        )
    },
}
"""By stage: the module of its worker process, and a request that is refused there because it exceeds the context."""


def children(module: str) -> list[int]:
    """Child processes of this test that run a module."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, IndexError):
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid() and module.encode() in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
    return found


@pytest.mark.parametrize("stage", STAGES)
def test_07_work_of_disconnected_clients_is_dropped_at_every_stage(
    default_model_path: Path, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, path, body = STAGES[stage]

    async def run() -> None:
        async with in_process(default_model_path, max_context=2048) as app:
            for _ in range(2):
                assert (await app.send(path, body)).status == 400
            [pid] = children(module)
            num_jobs, run_job = 0, worker.Worker.run

            async def counted(self: worker.Worker, *job: bytes | bytearray, seconds: float) -> bytes:
                nonlocal num_jobs
                num_jobs += 1
                return await run_job(self, *job, seconds=seconds)

            monkeypatch.setattr(worker.Worker, "run", counted)
            leaving = [asyncio.create_task(app.send(path, body, leaves_after=0.01)) for _ in range(30)]
            await asyncio.gather(*leaving)
            assert (await app.send(path, body)).status == 400
            assert pid in children(module), "short work runs to its end: a new process costs more"
            assert 1 <= num_jobs <= 15, "jobs that wait when their client disconnects are dropped"

    asyncio.run(run())


@pytest.mark.parametrize("stage", ["body", "text"])
def test_10_a_stuck_process_fails_one_request_and_is_replaced(
    default_model_path: Path, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, path, body = STAGES[stage]

    async def run() -> None:
        async with in_process(default_model_path, max_context=2048) as app:
            assert (await app.send(path, body)).status == 400
            [pid] = children(module)
            os.kill(pid, signal.SIGSTOP)
            monkeypatch.setattr(bodies if stage == "body" else prompts, "_SECONDS", 1.0)
            stuck = await app.send(path, body)
            monkeypatch.undo()
            assert stuck.status == 503 and b"server_busy" in stuck.body and b"retry-after" in stuck.headers
            assert (await app.send(path, body)).status == 400
            assert pid not in children(module)

    asyncio.run(run())


HEAVY = {
    "type": "object",
    "properties": {f"p{index}": {"type": "string"} for index in range(300)},
    "minProperties": 1,
    "additionalProperties": False,
}
"""A schema that takes a second to compile."""


def grammar_seconds(server: Server) -> float:
    """CPU seconds of the grammar processes and of their ended children."""
    ticks = 0
    for pid in server.children():
        with suppress(OSError):
            if b"grammar_process" in Path(f"/proc/{pid}/cmdline").read_bytes():
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def test_07_grammars_of_disconnected_clients_do_not_delay_the_next(server: Server) -> None:
    assert server.chat(guided_regex="a").status_code == 200
    before = grammar_seconds(server)
    assert server.chat(json_schema={**HEAVY, "title": f"whole {time.time()}"}).status_code in (200, 400)
    whole_seconds = grammar_seconds(server) - before
    before = grammar_seconds(server)
    for index in range(12):
        fields = {"messages": MESSAGES, "json_schema": {**HEAVY, "title": f"{index} {time.time()}"}}
        body = json.dumps(fields).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(head.encode() + body)
            time.sleep(0.05)
    assert server.chat(guided_regex=f"a{{{time.time_ns() % 1000},1000}}").status_code == 200
    # Half of compiling them to their ends. They had twelve trials of 0.05 s, one of 1 s, and the start of a process.
    assert grammar_seconds(server) - before < 6 * whole_seconds
