"""Requests leave no reference cycles: a full garbage collection would stop the event loop."""

import asyncio
import ctypes
import gc
import heapq
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from in_process import in_process
from uvicorn.server import ServerState

from weft.server.http.protocol import TimedProtocol

BODIES: list[dict[str, Any]] = [
    {"prompt": [1, 2, 3], "max_tokens": 4, "seed": 1},
    {"prompt": [1, 2, 3], "max_tokens": 4, "stream": True, "logprobs": 2, "stop": ["x"], "seed": 1},
    {"prompt": [1, 2, 3], "max_tokens": 4, "stream": True, "seed": 1},
    {"prompt": [1, 2, 3], "max_tokens": "many"},  # refused by the schema
    {"prompt": [1, 2, 3], "temperature": -1},  # refused by the sampling parameters
    {"prompt": [1] * 64, "max_tokens": 4},  # refused by the server: too long
    {"prompt": [49151, 1 << 20], "max_tokens": 4},  # refused by the engine
    {"prompt": [1, 2, 3], "max_tokens": 4, "seed": 1, "model": "other"},
]
REPEATS = 20


async def ask(port: int, body: bytes, *, leaves: bool) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    if not leaves:
        assert (await reader.read()).startswith(b"HTTP/1.1 "), "there was no response"
    writer.close()
    await writer.wait_closed()


@asynccontextmanager
async def asking(model_path: Path) -> AsyncIterator[Callable[[int], Awaitable[None]]]:
    """A server with sockets. Yields a function that sends all bodies so many times and waits until they have ended."""
    async with in_process(model_path) as server:
        config = uvicorn.Config(
            server._asgi, ws="none", lifespan="off", log_config=None, h11_max_incomplete_event_size=1 << 16
        )
        config.load()
        state = ServerState()
        listening = await asyncio.get_running_loop().create_server(
            lambda: TimedProtocol(
                config, state, header_seconds=10, body_seconds=10, stalled_reader_seconds=10
            ),
            "127.0.0.1",
            0,
        )
        port = listening.sockets[0].getsockname()[1]

        async def ask_all(repeats: int) -> None:
            for _ in range(repeats):
                for number, fields in enumerate(BODIES):
                    await ask(port, json.dumps(fields).encode(), leaves=number == 1)
            while state.connections or state.tasks:
                await asyncio.sleep(0.01)

        await ask_all(1)  # objects that are created once do not count
        try:
            yield ask_all
        finally:
            listening.close()


async def leftovers(model_path: Path) -> Counter[str]:
    """Unreachable objects after requests of every kind, by type."""
    async with asking(model_path) as ask_all:
        gc.collect()
        gc.disable()
        try:
            await ask_all(REPEATS)
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            return Counter(type(one).__name__ for one in gc.garbage)
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()


async def kept(model_path: Path) -> tuple[int, Counter[str], int]:
    """How many memory blocks and objects of each type are kept after requests of every kind; and their number."""

    def count() -> tuple[int, Counter[str]]:
        # An event loop removes cancelled timers only when there are many of them.
        loop: Any = asyncio.get_running_loop()
        loop._scheduled = [timer for timer in loop._scheduled if not timer.cancelled()]
        heapq.heapify(loop._scheduled)
        loop._timer_cancelled_count = 0
        gc.collect()
        return sys.getallocatedblocks(), Counter(type(one).__name__ for one in gc.get_objects())

    async with asking(model_path) as ask_all:
        await ask_all(REPEATS)  # fills the caches
        blocks, objects = count()
        await ask_all(5 * REPEATS)
        blocks_after, objects_after = count()
        return blocks_after - blocks, objects_after - objects, 5 * REPEATS * len(BODIES)


async def leftovers_of_deadlines(model_path: Path) -> Counter[str]:
    """The same after requests that the server ended at their deadline, because the engine was stopped."""
    async with in_process(model_path) as server:
        process = server.server.engine._process
        assert process is not None
        os.kill(process.pid, signal.SIGSTOP)
        bodies = [
            json.dumps({"prompt": [1], "deadline": 0, "stream": number % 2 == 0}).encode()
            for number in range(2 * REPEATS)
        ]
        gc.collect()
        gc.disable()
        try:
            replies = await asyncio.gather(*(server.send("/v1/completions", body) for body in bodies))
            assert all(b"deadline_exceeded" in reply.body for reply in replies)
            del replies
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            found = Counter(type(one).__name__ for one in gc.garbage)
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
            os.kill(process.pid, signal.SIGCONT)
    return found


def test_requests_that_the_server_ends_at_their_deadline_leave_no_garbage(default_model_path: Path) -> None:
    found = asyncio.run(leftovers_of_deadlines(default_model_path))
    own = {"EventStream", "Choices", "ActiveRequest", "RemoteAnswer", "ApiError", "TimerHandle"}
    assert not own & {name for name, count in found.items() if count >= REPEATS}, found


def test_requests_leave_no_garbage(default_model_path: Path) -> None:
    found = asyncio.run(leftovers(default_model_path))
    often = {name: count for name, count in found.items() if count >= REPEATS}
    # The clients of this test also leave asyncio transports in cycles.
    own = {"TimedProtocol", "RequestResponseCycle", "BodyWriter", "EventStream"}
    own |= {"Choices", "ActiveRequest", "RemoteAnswer", "ApiError", "Task", "frame"}
    assert not own & often.keys(), often


def test_requests_keep_no_objects_and_no_memory(default_model_path: Path) -> None:
    """Counts objects and blocks: the memory of the process also depends on the allocator."""
    blocks, objects, num_requests = asyncio.run(kept(default_model_path))
    assert max(objects.values(), default=0) < 2 * REPEATS, objects.most_common(5)
    assert blocks < num_requests / 2, objects.most_common(5)


SCATTERED = """
import asyncio, sys
from pathlib import Path
from weft.server.http.byte_budget import trim_often

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 >> 20

many = [bytes(1000 + number % 50) for number in range(100_000)]
kept = many[::100]  # scattered, so that no end of the heap is free
del many

async def run():
    before = resident()
    task = asyncio.create_task(trim_often(0.01))
    while before - resident() < 60:
        await asyncio.sleep(0.01)
    task.cancel()

asyncio.run(asyncio.wait_for(run(), 60))
"""


@pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="only glibc returns memory on request"
)
def test_free_memory_between_kept_objects_returns_to_the_system() -> None:
    done = subprocess.run([sys.executable, "-c", SCATTERED], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
