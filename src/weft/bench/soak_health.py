"""Polls /health of a server 20 times per second, in a separate process: python -m weft.bench.soak_health HOST PORT.

Each poll prints one line: its scheduled time (monotonic clock), the seconds from then to the end of the answer, and the
status, 0 without an answer. No poll waits for another. The process ends when its standard input is closed.
"""

from __future__ import annotations

import asyncio
import sys
import time

POLLS_PER_SECOND = 20
_TIMEOUT_SECONDS = 10.0


async def poll(host: str, port: int, due: float) -> None:
    """One poll on a new connection, as a liveness probe does it."""
    try:
        async with asyncio.timeout(_TIMEOUT_SECONDS):
            status = await _status(host, port)
    except (OSError, TimeoutError):
        status = 0
    print(f"{due:.6f} {time.monotonic() - due:.6f} {status}", flush=True)


async def _status(host: str, port: int) -> int:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        name = f"[{host}]" if ":" in host else host
        writer.write(f"GET /health HTTP/1.1\r\nHost: {name}:{port}\r\nConnection: close\r\n\r\n".encode())
        fields = (await reader.readline()).split(b" ")
        await reader.read()
        return int(fields[1]) if len(fields) > 1 else 0
    finally:
        writer.close()


async def poll_until_closed(host: str, port: int) -> None:
    loop = asyncio.get_running_loop()
    is_over = asyncio.Event()
    loop.add_reader(sys.stdin, is_over.set)
    polls: set[asyncio.Task[None]] = set()
    due = time.monotonic()
    while not is_over.is_set():
        task = asyncio.create_task(poll(host, port, due))
        polls.add(task)
        task.add_done_callback(polls.discard)
        due += 1 / POLLS_PER_SECOND
        try:
            await asyncio.wait_for(is_over.wait(), max(0.0, due - time.monotonic()))
        except TimeoutError:
            pass
    loop.remove_reader(sys.stdin)
    await asyncio.gather(*polls)


if __name__ == "__main__":
    asyncio.run(poll_until_closed(sys.argv[1], int(sys.argv[2])))
