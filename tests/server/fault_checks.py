"""What a fault run observes: health, memory, descriptors, gauges, and connections whose client does not read."""

from __future__ import annotations

import asyncio
import http.client
import itertools
import os
import socket
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import httpx
from server_process import Server

_POLL_SECONDS = 0.05
_ESTABLISHED = "01"
_NUMBERS = itertools.count()


@dataclass(frozen=True)
class Poll:
    began: float
    ended: float
    health: int
    ready: int
    """HTTP statuses; 0 if there was no response."""


class HealthPolls:
    """Polls `/health` and `/ready` from a thread, each time on a new connection."""

    def __init__(self, port: int) -> None:
        self.polls: list[Poll] = []
        self._port = port
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._poll, daemon=True)

    def __enter__(self) -> HealthPolls:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _poll(self) -> None:
        while not self._is_over.wait(_POLL_SECONDS):
            began = time.monotonic()
            health, ready = (self._status(path) for path in ("/health", "/ready"))
            self.polls.append(Poll(began, time.monotonic(), health, ready))

    def _status(self, path: str) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=5)
        try:
            connection.request("GET", path)
            return connection.getresponse().status
        except (OSError, http.client.HTTPException):
            return 0
        finally:
            connection.close()


def send_and_stall(port: int, message: bytes) -> socket.socket:
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", port))
    connection.sendall(message)
    return connection


def is_open(connection: socket.socket) -> bool:
    """Whether the server has not closed the connection. Asks the kernel, since the client does not read."""
    (_, own_port), (_, port) = connection.getsockname(), connection.getpeername()
    lines = (line.split()[1:4] for line in Path("/proc/net/tcp").read_text().splitlines()[1:])
    ends = (f":{port:04X}", f":{own_port:04X}", _ESTABLISHED)
    return any((local[-5:], remote[-5:], state) == ends for local, remote, state in lines)


@dataclass(frozen=True)
class Footprint:
    """Values that must return to the baseline: memory and descriptors of the HTTP process, and gauges of active
    requests and KV blocks in use."""

    mib: float
    descriptors: int
    gauges: tuple[float, ...]


async def footprint(server: Server) -> Footprint:
    """Measured when all requests have ended and all worker processes run; two of these check grammars."""
    number = next(_NUMBERS)
    await asyncio.gather(
        *(
            asyncio.to_thread(httpx.post, f"{server.url}/v1/completions", json=fields, timeout=60)
            for fields in (
                {"prompt": "word " * 2_000, "max_tokens": 1},
                {"prompt": "x", "max_tokens": 1, "user": "u" * 300_000},
                *(
                    {"prompt": "x", "max_tokens": 2, "guided_regex": f"[a-{end}]{{2,{900 + number}}}"}
                    for end in "bcd"
                ),
            )
        )
    )
    await asyncio.to_thread(server.chat)
    await asyncio.to_thread(server.wait_until_free)
    pid = server.process.pid
    names = ("http_requests_open", "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    gauges = await asyncio.to_thread(server.metrics, *names)
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    descriptors = _settled_descriptors(server)
    return Footprint(pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20), await descriptors, tuple(gauges))


async def _settled_descriptors(server: Server) -> int:
    """Open descriptors without the two pipes of each worker process: the number of workers depends on the last
    requests. Takes the minimum over two seconds, since closed connections disappear with a delay."""
    counts = []
    for _ in range(20):
        num_open = len(os.listdir(f"/proc/{server.process.pid}/fd"))
        counts.append(num_open - 2 * len(server.children()))
        await asyncio.sleep(0.1)
    return min(counts)
