"""The application of the server without sockets, with a real engine on the noop backend. It handles thousands of
requests a second."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from server_process import MODEL

from weft.engine.ipc.client import EngineClient
from weft.loading.checkpoint import open_checkpoint
from weft.server.api.formats import FORMATS, Formats
from weft.server.app import ServerApp
from weft.server.logs import ServerLog
from weft.server.settings import ServerSettings
from weft.text.model_text import open_model_text


@dataclass(frozen=True)
class Reply:
    status: int
    headers: dict[bytes, bytes]
    body: bytes


class InProcess:
    def __init__(self, server: ServerApp) -> None:
        self.server = server
        self._asgi = server.asgi()

    async def send(
        self,
        path: str,
        body: bytes = b"",
        leaves_after: float | None = None,
        method: str = "POST",
        key: str | None = None,
        more_headers: Mapping[bytes, bytes] = MappingProxyType({}),
        query: str = "",
    ) -> Reply:
        """Sends a request and returns the response. The client disconnects after `leaves_after` seconds."""
        messages = [{"type": "http.request", "body": body, "more_body": False}]
        sent: list[Any] = []

        async def receive() -> Any:
            if messages:
                return messages.pop()
            await asyncio.sleep(3600 if leaves_after is None else leaves_after)
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
        }
        headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        headers += more_headers.items()
        if key is not None:
            headers.append((b"authorization", b"Bearer " + key.encode()))
        await self._asgi({**scope, "root_path": "", "headers": headers}, receive, send)  # type: ignore[arg-type]
        status, fields = (sent[0]["status"], dict(sent[0]["headers"])) if sent else (0, {})
        return Reply(status, fields, b"".join(one.get("body", b"") for one in sent[1:]))


@asynccontextmanager
async def in_process(
    model_path: Path, *, max_context: int = 64, formats: Formats = FORMATS, **settings: Any
) -> AsyncIterator[InProcess]:
    checkpoint = open_checkpoint(model_path)
    text = open_model_text(checkpoint)
    state = tempfile.TemporaryDirectory()
    chosen = ServerSettings(str(model_path), (MODEL,), **{"state_path": state.name, **settings})
    engine = EngineClient("noop", {"vocabulary_size": 49152, "max_context": max_context}, chosen.engine)
    await engine.start()
    server = ServerApp(chosen, text, checkpoint.generation, engine, ServerLog("off"), formats)
    try:
        yield InProcess(server)
    finally:
        await server.close()
        await engine.stop()
        text.close()
        state.cleanup()
        await asyncio.sleep(0.1)  # the event loop must see the end of the worker processes
