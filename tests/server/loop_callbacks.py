"""Sends large bodies to a server and measures the longest callback of its event loop.

It runs in its own process: in a test process, the objects of other tests make callbacks slower.
"""

from __future__ import annotations

import asyncio
import asyncio.events
import gc
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from in_process import InProcess, in_process
from vector_models import embedder_path, noop_embedder, noop_reranker

MOST_REFERENCES = 4.0
"""Limit for one callback, as a multiple of the reference. Blocking callbacks took 13 to 45 references; the longest one
now takes 1."""
MOST_TRIES = 4


def reference_seconds() -> float:
    """CPU time of fixed work in Python, about 15 ms: a measure for the current speed of this processor."""
    gc.disable()
    began = time.thread_time()
    for _ in range(3):
        {str(number): [number] for number in range(20_000)}
    seconds = time.thread_time() - began
    gc.enable()
    return seconds


class Callbacks:
    """The longest callback of the event loop, in CPU seconds."""

    longest = 0.0
    what = ""


@contextmanager
def timed_callbacks() -> Iterator[Callbacks]:
    plain_run = asyncio.events.Handle._run
    seen = Callbacks()

    def timed_run(handle: asyncio.events.Handle) -> None:
        began = time.thread_time()
        plain_run(handle)
        if (seconds := time.thread_time() - began) > seen.longest:
            seen.longest, seen.what = seconds, repr(handle)

    asyncio.events.Handle._run = timed_run  # type: ignore[method-assign]
    gc.disable()  # a collection would count as part of the current callback
    try:
        yield seen
    finally:
        gc.enable()
        asyncio.events.Handle._run = plain_run  # type: ignore[method-assign]


def schema(num_properties: int) -> dict[str, Any]:
    properties = {f"property{index}": {"type": "string"} for index in range(num_properties)}
    return {"type": "object", "properties": properties}


def tool(name: str, num_properties: int) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": schema(num_properties)}}


MESSAGES = [{"role": "user", "content": "Hello"}]
COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
EMBED, RERANK = "/v1/embeddings", "/v1/rerank"
ONE = {"max_tokens": 1}
LONGEST = 46778
"""The longest token: 81 bytes."""

BODIES: dict[str, tuple[str, dict[str, Any], int]] = {
    "1024 prompts of text": (COMPLETION, {"prompt": ["word " * 200] * 1024, **ONE}, 200),
    "1024 tiny prompts": (COMPLETION, {"prompt": ["hi"] * 1024, **ONE}, 200),
    "60000 properties": (COMPLETION, {"prompt": "x", "json_schema": schema(60_000)}, 400),
    "7000 properties": (COMPLETION, {"prompt": "x", "json_schema": schema(7_000), **ONE}, 400),
    "128 tools": (
        CHAT,
        {"messages": MESSAGES, "tools": [tool(f"f{index}", 150) for index in range(128)]},
        400,
    ),
    "small biases": (COMPLETION, {"prompt": "x", "logit_bias": {f"{n}": 1 for n in range(25_000)}}, 400),
    "biases": (COMPLETION, {"prompt": "x", "logit_bias": {f"{n}": 1 for n in range(60_000)}}, 400),
    "80000 messages": (CHAT, {"messages": [{}] * 80_000}, 400),
    "20000 messages": (CHAT, {"messages": [{"role": "user", "content": "x"}] * 20_000}, 400),
    "values": (
        COMPLETION,
        {"prompt": "x", "metadata": {"all": {f"{n}": {} for n in range(32_000)}}, **ONE},
        200,
    ),
    "ids": ("/detokenize", {"tokens": [7] * 262_000}, 200),
    "long ids": ("/detokenize", {"tokens": [LONGEST] * 262_000}, 200),
    "small ids": ("/detokenize", {"tokens": [7] * 100_000}, 200),
    "text": ("/tokenize", {"prompt": "The quick brown fox. " * 400}, 200),
    "long text": ("/tokenize", {"prompt": "The quick brown fox. " * 40_000}, 400),
    "2048 texts for vectors": (EMBED, {"input": ["word " * 20] * 2048}, 200),
    "2048 lists of ids for vectors": (EMBED, {"input": [[7] * 60] * 2048, "encoding_format": "base64"}, 200),
    "2048 pairs": (RERANK, {"query": "why? " * 200, "documents": ["word " * 20] * 2048}, 200),
    "2048 pairs with a long query": (RERANK, {"query": "why? " * 80_000, "documents": ["a"] * 2048}, 200),
    "26000 files": ("/v1/vector_stores", {"file_ids": ["file-" + "0" * 32] * 26_000}, 400),
    "names": ("/v1/vector_stores", {"metadata": {f"{n}": [n] for n in range(60_000)}}, 400),
    "values of a filter": (
        "/v1/vector_stores/x/search",
        {"query": "x", "filters": {"type": "in", "key": "a", "value": [f"{n}" for n in range(100_000)]}},
        400,
    ),
    "echo": (COMPLETION, {"prompt": [[7] * 1000] * 200, "echo": True, **ONE}, 200),
}


async def measure(app: InProcess, name: str) -> dict[str, Any]:
    """The best of a few tries: a body that blocks the event loop does so in every try."""
    path, fields, status = BODIES[name]
    body = json.dumps(fields, separators=(",", ":")).encode()
    tries: list[dict[str, Any]] = []
    while len(tries) < MOST_TRIES and all(one["references"] >= MOST_REFERENCES for one in tries):
        before = reference_seconds()
        with timed_callbacks() as seen:
            reply = await asyncio.create_task(app.send(path, body))  # its first callback counts too
        assert reply.status == status, reply.body[:300]
        references = seen.longest / max(before, reference_seconds())
        tries.append({"references": references, "seconds": seen.longest, "callback": seen.what[:200]})
    return min(tries, key=lambda one: float(one["references"]))


async def measure_all(model_path: Path) -> dict[str, dict[str, Any]]:
    models = [noop_embedder(embedder_path()), noop_reranker(embedder_path())]
    async with in_process(model_path, max_context=4096, vector_models=models) as app:
        await app.send(COMPLETION, b'{"prompt": "x", "max_tokens": 1}')
        return {name: await measure(app, name) for name in BODIES}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(measure_all(Path(sys.argv[1])))))
