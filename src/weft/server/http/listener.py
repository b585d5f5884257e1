"""The listening sockets of a server, and the connections that they accept."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Sequence

import uvicorn
from starlette.types import ASGIApp
from uvicorn.server import ServerState

from weft.errors import WeftError
from weft.server.http.protocol import TimedProtocol
from weft.server.settings import ServerSettings

FLUSH_SECONDS = 2.0
_BACKLOG = 1024
_ACCEPTS_PER_ITERATION = 8
"""Connections to accept in one iteration of the event loop. More would delay the open streams."""
_KEEP_ALIVE_SECONDS = 30


class Listener:
    """Owns the sockets and the connections. Use `bind`, then `accept`, then `close`."""

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self._state = ServerState()
        self._servers: list[asyncio.Server] = []
        self._new_id: Callable[[], str] | None = None
        self._configs: list[uvicorn.Config] = []
        """configs[i] is the configuration for the connections of socket i."""

    async def bind(self, port: int, flag: str) -> None:
        """Binds a port without accepting connections. `flag` is the option that changes the port."""
        host, index = self._settings.host, len(self._servers)
        try:
            server = await asyncio.get_running_loop().create_server(
                lambda: self._protocol(index),
                host,
                port,
                # asyncio uses this as the number of accepts per iteration too. `accept` sets the kernel's backlog.
                backlog=_ACCEPTS_PER_ITERATION,
                start_serving=False,
            )
        except OSError as error:
            raise WeftError(
                f"cannot listen on {host}, port {port}: {error.strerror or error}; choose another address with {flag}"
            ) from error
        self._servers.append(server)

    async def accept(self, apps: Sequence[ASGIApp], new_id: Callable[[], str] | None = None) -> list[int]:
        """Accepts connections. Connections of socket i go to apps[i]. Returns the port of each socket. `new_id`
        makes the ids of requests that are refused before they reach an app."""
        self._new_id = new_id
        self._configs = [self._config(app) for app in apps]
        for server in self._servers:
            await server.start_serving()
            for listening in server.sockets:
                with socket.fromfd(listening.fileno(), listening.family, listening.type) as same:
                    same.listen(_BACKLOG)
        return [server.sockets[0].getsockname()[1] for server in self._servers]

    async def close(self) -> None:
        """Closes each connection after its pending bytes are sent, or after `FLUSH_SECONDS`."""
        for server in self._servers:
            server.close()
        give_up_at = time.monotonic() + FLUSH_SECONDS
        if self._state.tasks:
            await asyncio.wait(self._state.tasks, timeout=FLUSH_SECONDS)
        for connection in list(self._state.connections):
            connection.shutdown()
        while self._state.connections and time.monotonic() < give_up_at:
            await asyncio.sleep(0.01)
        for connection in list(self._state.connections):
            connection.transport.abort()  # unsent bytes would keep the process alive

    def _config(self, app: ASGIApp) -> uvicorn.Config:
        config = uvicorn.Config(
            app,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            h11_max_incomplete_event_size=self._settings.max_header_bytes,
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        )
        config.load()
        return config

    def _protocol(self, index: int) -> TimedProtocol:
        """The protocol of a new connection."""
        return TimedProtocol(
            self._configs[index],
            self._state,
            header_seconds=self._settings.header_seconds,
            body_seconds=self._settings.body_seconds,
            stalled_reader_seconds=self._settings.stalled_reader_seconds,
            new_id=self._new_id,
        )
