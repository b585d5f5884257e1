"""Idle work beside interactive requests over HTTP, with the default model or the noop backend.

A server in this process, with an engine process, answers streamed requests. The idle work is made of requests that the
server sends to itself, as it does for lines of batches.
"""

from __future__ import annotations

import asyncio
import json as json_module
import random
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise

import uvicorn

from benchmarks.idle_work import IDLE_SECONDS, Figures, Pairs, is_idle_round, lengths
from weft.bench.serve_client import Client
from weft.engine.ipc.client import EngineClient
from weft.errors import WeftError
from weft.loading.checkpoint import open_checkpoint
from weft.loading.pull import pull
from weft.server.app import ServerApp
from weft.server.internal import InternalRequest
from weft.server.logs import ServerLog
from weft.server.settings import ServerSettings
from weft.text.model_text import open_model_text

_NOOP_CONTEXT = 2048


async def measure(backend: str, seconds: float, rounds: int, clients: int, lines: int) -> Pairs:
    pairs = [(Figures(), Figures()) for _ in range(rounds)]
    async with _server(backend) as (app, port):
        client = Client(f"http://127.0.0.1:{port}")
        await _interactive(client, random.Random(0), min(1.0, seconds), Figures(), "warm-up")
        for number in range(2 * rounds):
            has_idle_work = is_idle_round(number)
            now = pairs[number // 2][has_idle_work]
            idle = [
                asyncio.create_task(_idle_work(app, random.Random(f"{number} {line}"), now))
                for line in range(lines if has_idle_work else 0)
            ]
            began = time.perf_counter()
            await asyncio.sleep(IDLE_SECONDS if idle else 0.0)
            sources = [random.Random(f"{number // 2} {one}") for one in range(clients)]
            salt = f"round {number}"
            await asyncio.gather(*(_interactive(client, source, seconds, now, salt) for source in sources))
            now.seconds += time.perf_counter() - began
            for task in idle:
                task.cancel()
            await asyncio.gather(*idle, return_exceptions=True)
        client.close()
    return pairs


async def _interactive(
    client: Client, source: random.Random, seconds: float, figures: Figures, salt: str
) -> None:
    """One client: streamed requests, with pauses between them."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        body = _body(source, stream=True, cache_salt=salt)
        answer, _ = await client.send(client.message("POST", "/v1/completions", body), 60.0)
        if answer.failure is not None:
            raise WeftError(f"{answer.failure.kind}: {answer.failure.detail}")
        figures.first_token.append(answer.chunk_times[0] - answer.began)
        figures.gap += [later - earlier for earlier, later in pairwise(answer.chunk_times)]
        await asyncio.sleep(source.expovariate(5.0))


async def _idle_work(app: ServerApp, source: random.Random, figures: Figures) -> None:
    """Sends lines of a batch one after another: each line starts when the previous one has ended."""
    request = InternalRequest(None, is_idle_work=True)
    while True:
        reply = await app.send_internal("/v1/completions", _body(source, stream=False), request)
        if reply.status != 200:
            raise WeftError(f"a line of idle work got the status {reply.status}: {reply.body[:200]!r}")
        figures.idle_tokens += json_module.loads(reply.body)["usage"]["completion_tokens"]


def _body(source: random.Random, stream: bool, **fields: str) -> bytes:
    prompt_length, max_tokens = lengths(source)
    prompt = [source.randrange(100, 10_000) for _ in range(prompt_length)]
    body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "stream": stream}
    return json_module.dumps(body | fields).encode()


@asynccontextmanager
async def _server(backend: str) -> AsyncIterator[tuple[ServerApp, int]]:
    path = str(pull("default"))
    checkpoint = open_checkpoint(path)
    text = open_model_text(checkpoint)
    settings = ServerSettings(path, ("default",), backend=backend)
    size = {"vocabulary_size": text.tokenizer.vocabulary_size, "max_context": _NOOP_CONTEXT}
    engine = EngineClient(backend, size if backend == "noop" else {"checkpoint": path}, settings.engine)
    await engine.start()
    app = ServerApp(settings, text, checkpoint.generation, engine, ServerLog("off"))
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app.asgi(), lifespan="off", log_level="error", ws="none"))
    serving = asyncio.create_task(server.serve([listening]))
    try:
        yield app, listening.getsockname()[1]
    finally:
        server.should_exit = True
        await serving
        await app.close()
        await engine.stop()
        text.close()
