"""The life cycle of a server: start the engine, load tokenizer and chat template, listen, drain, stop."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import logging
import os
import resource
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from weft.embedding import EmbeddingSpec
from weft.engine.ipc.client import EngineClient
from weft.engine.ipc.launch import LaunchedEngine
from weft.loading.checkpoint import open_checkpoint
from weft.plan import BackendInfo
from weft.server.app import ServerApp, open_store
from weft.server.http.byte_budget import trim_often
from weft.server.http.listener import FLUSH_SECONDS, Listener
from weft.server.http.scope import OLLAMA_PORT
from weft.server.learned.keeper import LearnedKeeper
from weft.server.logs import LibraryHandler, ServerLog
from weft.server.models import ModelRegistry
from weft.server.otlp import OtlpExporter, open_exporter
from weft.server.settings import ServerSettings
from weft.server.vectors.model import VectorModel
from weft.server.vectors.model_files import VectorModelFiles
from weft.server.vectors.text_tokens import VectorTexts
from weft.text.embedding_text import EmbeddingText
from weft.text.model_text import ModelText, open_model_text

_OWN_DESCRIPTORS = 64
"""Descriptors of the server itself: files, listening sockets, and the pipes and sockets of its processes. A process
that restarts has two sets of them for a moment."""
_DESCRIPTORS_PER_REQUEST = 2
"""One for the connection of the request, and one for an idle or refused connection."""


@dataclass(frozen=True)
class Started:
    """Describes a server that has started to accept requests."""

    host: str
    port: int
    info: BackendInfo
    max_context: int
    has_chat_template: bool
    ollama_port: int | None = None


def serve(
    settings: ServerSettings,
    on_start: Callable[[Started], object],
    log: ServerLog,
    launched: LaunchedEngine | None = None,
    *,
    spec: EmbeddingSpec | None = None,
    vector_models: Sequence[VectorModelFiles] = (),
) -> None:
    """Serves until a signal arrives, then closes the log. `launched` is the engine process if the caller started it
    already, before the imports of the server. `spec` is given if MODEL makes vectors or scores and does not generate. The
    backend and the engine in the settings are then for it."""
    logging.basicConfig(handlers=[LibraryHandler(log)], level=logging.WARNING)
    settings = _within_descriptors(settings, log)
    try:
        asyncio.run(_ServerRun(settings, on_start, log, launched, spec, vector_models).run())
    finally:
        gc.unfreeze()  # lets the interpreter free the remaining objects at exit
        log.close()


def _within_descriptors(settings: ServerSettings, log: ServerLog) -> ServerSettings:
    """Raises the descriptor limit to the hard limit, and lowers `max_requests` to what that limit allows."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # on macOS the kernel may allow less than the hard limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    max_requests = max(1, (limit - _OWN_DESCRIPTORS) // _DESCRIPTORS_PER_REQUEST)
    if limit == resource.RLIM_INFINITY or settings.max_requests <= max_requests:
        return settings
    log.event(
        "warning",
        f"max_requests is {max_requests} instead of {settings.max_requests}: this process may open {limit} descriptors, "
        f"and needs {_DESCRIPTORS_PER_REQUEST} for each request and {_OWN_DESCRIPTORS} for itself. "
        "Raise the hard limit (ulimit -n, LimitNOFILE) to allow more requests.",
        "warning",
    )
    return dataclasses.replace(settings, max_requests=max_requests)


def _tune_garbage_collection() -> None:
    """Keeps garbage collections short: a full one stops the event loop for up to 0.16 s with five hundred streams.

    Objects that exist now are frozen, so that no collection visits them. Young collections are frequent and take
    milliseconds. Full collections are rare: requests leave no reference cycles (tests/server/test_garbage.py).
    """
    gc.freeze()
    gc.enable()  # `weft serve` disables it during the start
    gc.set_threshold(1_000, 1, 1_500)


def _through_ollama_port(app: ASGIApp) -> ASGIApp:
    """Marks the requests that came in through the second port."""

    async def marked(scope: Scope, receive: Receive, send: Send) -> None:
        scope[OLLAMA_PORT] = True
        await app(scope, receive, send)

    return marked


def _open_vector_model(
    spec: EmbeddingSpec, path: str, names: Sequence[str], engine: EngineClient
) -> VectorModel:
    text = EmbeddingText(open_checkpoint(path), spec)
    return VectorModel(names, path, spec, engine, VectorTexts(text, path))


def _log_of_model(
    log: Callable[..., object], model: str, name: str, message: str, level: str = "info", **fields: Any
) -> None:
    """Logs an event of the engine of a vector model, with the name of the model."""
    log(name, f"{model}: {message}", level, model=model, **fields)


class _ServerRun:
    def __init__(
        self,
        settings: ServerSettings,
        on_start: Callable[[Started], object],
        log: ServerLog,
        launched: LaunchedEngine | None,
        spec: EmbeddingSpec | None,
        vector_models: Sequence[VectorModelFiles],
    ) -> None:
        self._settings = settings
        self._spec = spec
        self._on_start = on_start
        self._log = log
        self._stop = asyncio.Event()
        self._listener = Listener(settings)
        """The first port of the listener is the main one, the second is `ollama_port`."""
        self._engine = EngineClient(
            settings.backend,
            settings.backend_options,
            settings.engine,
            stall_seconds=settings.stall_seconds,
            coalesce=settings.coalesce,
            log=log.event,
            launched=launched,
        )
        self._vector_models = [
            (
                each,
                EngineClient(
                    each.backend,
                    each.backend_options,
                    each.spec.engine_config(),
                    stall_seconds=settings.stall_seconds,
                    log=partial(_log_of_model, log.event, each.names[0]),
                ),
            )
            for each in vector_models
        ]
        self._engines = [self._engine, *(engine for _, engine in self._vector_models)]

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number)
        starting: asyncio.Future[Any] | None = None
        text: ModelText | None = None
        exporter: OtlpExporter | None = None
        stopping = asyncio.ensure_future(self._stop.wait())
        try:
            # First, so that a port in use is reported before the model is loaded.
            await self._bind()
            learned = LearnedKeeper(
                self._settings, open_store(self._settings, self._log), self._engine, self._log.event
            )
            learned.start_reading()
            starting = asyncio.gather(*(engine.start() for engine in self._engines))
            await asyncio.sleep(0)  # starts the engine processes, in parallel with the work below
            exporter = open_exporter(self._settings.otlp_endpoint, self._log.event)
            text, generation_defaults = self._open_text()
            await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
            if not starting.done():
                return
            starting.result()
            models = ModelRegistry(
                self._settings, None if self._spec is not None else self._engine, self._open_vector_models()
            )
            app = ServerApp(
                self._settings,
                text,
                generation_defaults,
                self._engine,
                self._log,
                exporter=exporter,
                models=models,
                learned=learned,
            )
            await learned.begin()
            tasks = [asyncio.create_task(app.watch_loop()), asyncio.create_task(trim_often())]
            try:
                await self._listen(app, tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)  # until the batches have saved the results that have arrived
                await app.close()
        finally:
            stopping.cancel()
            if starting is None or not starting.done():
                for engine in self._engines:
                    engine.kill()  # an engine handles no stop message until its weights are loaded
            if starting is not None and not starting.cancel():
                starting.exception()  # retrieved so that asyncio does not log it a second time
            await asyncio.gather(*(engine.stop() for engine in self._engines))
            if text is not None:
                text.close()
            if exporter is not None:
                exporter.close()

    def _open_text(self) -> tuple[ModelText, Mapping[str, Any]]:
        """Opens the tokenizer and the generation defaults of the model. Does not keep the checkpoint: it has megabytes of
        vocabulary."""
        checkpoint = open_checkpoint(self._settings.model)
        text = open_model_text(checkpoint, self._settings.chat_template, self._settings.tool_format)
        return text, checkpoint.generation

    def _open_vector_models(self) -> list[VectorModel]:
        """The models that make vectors or scores, with their texts."""
        settings, found = self._settings, []
        if self._spec is not None:
            found.append(_open_vector_model(self._spec, settings.model, settings.names, self._engine))
        for each, engine in self._vector_models:
            model = _open_vector_model(each.spec, each.path, each.names, engine)
            # With a lease, the engine of MODEL computes on the same cores as this one.
            if self._spec is None and "core_lease" in settings.backend_options:
                model.beside = self._engine
            found.append(model)
        return found

    async def _bind(self) -> None:
        """Binds the addresses: the main one, and the one for Ollama's clients if `ollama_port` is set."""
        settings = self._settings
        await self._listener.bind(settings.port, "--host and --port")
        if settings.ollama_port is not None:
            await self._listener.bind(settings.ollama_port, "--host and --ollama-port")

    async def _listen(self, app: ServerApp, tasks: list[asyncio.Task[None]]) -> None:
        """Serves until a signal arrives. Adds to `tasks` the tasks that run as long as the server."""
        settings = self._settings
        asgi = app.asgi()
        _tune_garbage_collection()
        port, *others = await self._listener.accept([asgi, _through_ollama_port(asgi)], self._engine.new_id)
        info = self._engine.info
        assert info is not None
        self._on_start(
            Started(
                settings.host,
                port,
                info,
                self._engine.max_sequence_length,
                has_chat_template=app.text.chat_template is not None,
                ollama_port=others[0] if others else None,
            )
        )
        tasks.append(asyncio.create_task(app.run_batches()))
        tasks.append(asyncio.create_task(app.memory.run()))
        tasks.append(asyncio.create_task(app.answers.run()))
        tasks.append(asyncio.create_task(app.learned.run()))
        await self._stop.wait()
        # New requests now get a 503 with Retry-After. A refused connection would not tell the client when to retry.
        app.is_draining = True
        seconds = settings.drain_seconds
        message = f"Stopping: active requests have {seconds:g} s to end. A second signal stops at once."
        self._log.event("draining", message, seconds=seconds)
        if not await app.wait_until_idle(seconds):
            self._log.event("cancelling", "Some requests did not end in time; they are cancelled.", "warning")
            await asyncio.gather(*(engine.stop() for engine in self._engines))
            await app.wait_until_idle(FLUSH_SECONDS)
        await app.live.close()  # the streams of the live page never end by themselves
        await self._listener.close()
        self._log.event("stopped", "Stopped.")

    def _on_signal(self, number: int) -> None:
        if self._stop.is_set():
            for engine in self._engines:
                engine.kill()
            os._exit(128 + number)
        self._stop.set()
