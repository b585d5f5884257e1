"""The application of the server without sockets, with a real engine on the noop backend. It handles thousands of
requests a second."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any

import msgspec
from server_process import MODEL

from weft.config import SchedulerConfig, ServingEngineConfig
from weft.engine.ipc.client import EngineClient
from weft.loading.checkpoint import open_checkpoint
from weft.server.api.formats import FORMATS, Formats
from weft.server.app import ServerApp
from weft.server.logs import ServerLog
from weft.server.models import ModelRegistry
from weft.server.settings import ServerSettings
from weft.server.vectors.model import VectorModel
from weft.server.vectors.model_files import VectorModelFiles
from weft.server.vectors.text_tokens import VectorTexts
from weft.text.embedding_text import EmbeddingText
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
        leaves_at: bytes | None = None,
        reads_after: asyncio.Event | None = None,
    ) -> Reply:
        """Sends a request and returns the response. The client disconnects after `leaves_after` seconds, or when it has
        received `leaves_at`. `reads_after`: it does not read the body before this is set. `path` may have a query."""
        path, _, in_path = path.partition("?")
        query = in_path or query
        messages = [{"type": "http.request", "body": body, "more_body": False}]
        sent: list[Any] = []
        left = asyncio.Event()

        async def receive() -> Any:
            if messages:
                return messages.pop()
            if leaves_at is not None:
                await left.wait()
            else:
                await asyncio.sleep(3600 if leaves_after is None else leaves_after)
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if reads_after is not None and message["type"] == "http.response.body":
                await reads_after.wait()
            sent.append(message)
            if leaves_at is not None and leaves_at in message.get("body", b""):
                left.set()

        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
        }
        headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        headers = [*(one for one in headers if one[0] not in more_headers), *more_headers.items()]
        if key is not None:
            headers.append((b"authorization", b"Bearer " + key.encode()))
        await self._asgi({**scope, "root_path": "", "headers": headers}, receive, send)  # type: ignore[arg-type]
        status, fields = (sent[0]["status"], dict(sent[0]["headers"])) if sent else (0, {})
        return Reply(status, fields, b"".join(one.get("body", b"") for one in sent[1:]))


@asynccontextmanager
async def in_process(
    model_path: Path, *, max_context: int = 64, formats: Formats = FORMATS, **settings: Any
) -> AsyncIterator[InProcess]:
    """`settings` may also have `seconds_per_step` of the backend, fields of the `scheduler`, `vector_models`, and
    `backend_options`: then the backend is not noop but that of `backend`."""
    with TemporaryDirectory() as folder:
        async with _in_process(
            model_path, max_context, formats, {"state_path": folder, **settings}
        ) as server:
            yield server


@asynccontextmanager
async def _in_process(
    model_path: Path, max_context: int, formats: Formats, settings: dict[str, Any]
) -> AsyncIterator[InProcess]:
    checkpoint = open_checkpoint(model_path)
    text = open_model_text(checkpoint, settings.get("chat_template"))
    options: dict[str, Any] = settings.pop("backend_options", None) or {"vocabulary_size": 49152}
    options["max_context"] = max_context
    if "seconds_per_step" in settings:
        options["seconds_per_step"] = settings.pop("seconds_per_step")
    if "scheduler" in settings:
        settings["engine"] = ServingEngineConfig(SchedulerConfig(**settings.pop("scheduler")))
    vector_models = msgspec.convert(settings.pop("vector_models", ()), tuple[VectorModelFiles, ...])
    chosen = ServerSettings(str(model_path), (MODEL,), **settings)
    engine = EngineClient(settings.get("backend", "noop"), options, chosen.engine, coalesce=chosen.coalesce)
    await engine.start()
    opened = [await _opened(one) for one in vector_models]
    models = ModelRegistry(chosen, engine, opened)
    server = ServerApp(chosen, text, checkpoint.generation, engine, ServerLog("off"), formats, models=models)
    application = InProcess(server)
    work = (server.run_batches(), server.memory.run(), server.answers.run())
    tasks = [asyncio.create_task(one) for one in work]
    try:
        yield application
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await server.close()
        for one in (engine, *(model.engine for model in opened)):
            await one.stop()
        text.close()
        await asyncio.sleep(0.1)  # the event loop must see the end of the worker processes


async def _opened(files: VectorModelFiles) -> VectorModel:
    engine = EngineClient(files.backend, files.backend_options, files.spec.engine_config())
    await engine.start()
    texts = VectorTexts(EmbeddingText(open_checkpoint(files.path), files.spec), files.path)
    return VectorModel(files.names, files.path, files.spec, engine, texts)
