"""Requests leave no reference cycles: a full garbage collection would stop the event loop."""

import asyncio
import gc
import json
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import uvicorn
from in_process import in_process
from uvicorn.server import ServerState

from weft.server.http.protocol import TimedProtocol

BODIES: list[dict[str, Any]] = [
    {"prompt": [1, 2, 3], "max_tokens": 4},
    {"prompt": [1, 2, 3], "max_tokens": 4, "stream": True, "logprobs": 2, "stop": ["x"]},
    {"prompt": [1, 2, 3], "max_tokens": 4, "stream": True},
    {"prompt": [1, 2, 3], "max_tokens": "many"},  # refused by the schema
    {"prompt": [1, 2, 3], "temperature": -1},  # refused by the sampling parameters
    {"prompt": [1] * 64, "max_tokens": 4},  # refused by the server: too long
    {"prompt": [49151, 1 << 20], "max_tokens": 4},  # refused by the engine
    {"prompt": [1, 2, 3], "max_tokens": 4, "model": "other"},
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


async def leftovers(model_path: Path) -> Counter[str]:
    """Unreachable objects after requests of every kind, by type."""
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
        gc.collect()
        gc.disable()
        try:
            await ask_all(REPEATS)
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            found = Counter(type(one).__name__ for one in gc.garbage)
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
            listening.close()
    return found


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
