"""The server: its state, its routes, and its responses to errors."""

from __future__ import annotations

import time
from collections.abc import Coroutine, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from weft import __version__
from weft.engine.ipc.client import EngineClient, EngineState
from weft.errors import WeftError
from weft.loading.cache import home_directory
from weft.server.admission.active_requests import ActiveRequests
from weft.server.answer_requests import AnswerRequests
from weft.server.api import docs_page
from weft.server.api.answer_format import AnswerFormat
from weft.server.api.formats import FORMATS, OTHER_ROUTES, Formats
from weft.server.api.preparing import Preparer
from weft.server.api.schema import DetokenizeRequest, TokenizeRequest
from weft.server.api.services import Caller
from weft.server.batches.batch_runner import BatchRunner
from weft.server.errors import (
    ApiError,
    as_api_error,
    json_response,
    renamed_fields,
)
from weft.server.http.access_log import AccessLog
from weft.server.http.bodies import BodyReader
from weft.server.http.guard import Guard
from weft.server.http.scope import KEY
from weft.server.internal import InternalReply, InternalRequest, send_internal
from weft.server.learned.answers import AnswerKeeper
from weft.server.learned.keeper import LearnedKeeper
from weft.server.live.feed import LiveFeed
from weft.server.live.held import requests_of_server
from weft.server.logs import ServerLog, current_record
from weft.server.loop_lag import watch_lag
from weft.server.memory.document_memory import DocumentMemory
from weft.server.metrics import CONTENT_TYPE, ServerMetrics
from weft.server.models import ModelRegistry
from weft.server.otlp import OtlpExporter
from weft.server.plain_requests import ITSELF, PlainRequest, PlainRequests
from weft.server.settings import ServerSettings
from weft.server.state.files import FileStore
from weft.server.state.store import Store
from weft.server.stream.choices import Choices
from weft.server.stream.events import Disconnected
from weft.server.stream.loop_turns import LoopTurns
from weft.server.tasks import Tasks
from weft.server.traces import Traces
from weft.text.model_text import ModelText

_BYTES_PER_TOKEN = 4
"""Estimated bytes per token in the body of `/tokenize`. The number of tokens to reserve from the rate limit, before the
text is tokenised, is calculated from it."""
_EXPOSED = (
    *("x-request-id", "request-id", "retry-after", "warning"),
    *(
        f"x-ratelimit-{value}-{unit}"
        for value in ("limit", "remaining", "reset")
        for unit in ("requests", "tokens")
    ),
)
"""Response headers that a web page of an allowed origin may read."""


def open_store(settings: ServerSettings, log: ServerLog) -> Store:
    folder = Path(settings.state_path).expanduser() if settings.state_path else home_directory() / "state"
    return Store(folder, log.event)


class ServerApp:
    """Owns the state that all requests share. Belongs to one event loop."""

    def __init__(
        self,
        settings: ServerSettings,
        text: ModelText,
        generation_defaults: Mapping[str, Any],
        engine: EngineClient,
        log: ServerLog,
        formats: Formats = FORMATS,
        exporter: OtlpExporter | None = None,
        models: ModelRegistry | None = None,
        learned: LearnedKeeper | None = None,
    ) -> None:
        """`engine` and `text` belong to MODEL. `models` has all models; None: only MODEL, which generates. `exporter` gets the
        traces of requests; None: no traces are made. `learned` owns the store; None: a new one is made."""
        self.settings = settings
        self.models = models or ModelRegistry(settings, engine, ())
        self.formats = formats
        self.text = text
        self.engine = engine
        self.is_draining = False
        assert engine.info is not None, "the engine must be started before the server"
        self._bodies = BodyReader()
        self._preparer = Preparer(
            settings, text, generation_defaults, engine.max_sequence_length, engine.info.vocabulary_size
        )
        self._log = log
        self._name = settings.names[0]
        self._metrics = ServerMetrics(self._name, is_two_tier=settings.engine.cache.is_two_tier)
        self._traces: Traces | None = None
        if exporter is not None:
            self._traces = Traces(self._name, formats, exporter.put)
            self._metrics.count_lost_traces = lambda: exporter.num_lost
        self.created = int(time.time())
        self._loop_turns = LoopTurns()
        self.active_requests = ActiveRequests(settings, engine, self._metrics, time.monotonic)
        self.plain_requests = PlainRequests(self, self.active_requests, self._bodies, self._loop_turns)
        self.learned = learned or LearnedKeeper(settings, open_store(settings, log), engine, log.event)
        self.store = self.learned.store
        self.answers = AnswerKeeper(settings, self.store, text.tokenizer, log.event)
        self._metrics.feedback = self.answers
        self._answer_requests = AnswerRequests(
            self,
            self._check_open,
            self._bodies,
            self._preparer,
            self._metrics,
            self._loop_turns,
            self.answers,
        )
        self.tasks = Tasks(settings.max_requests, len(settings.api_keys))
        self.files = FileStore(self.store, settings.max_stored_bytes)
        self.live = LiveFeed(
            self._name,
            engine,
            lambda: requests_of_server(self.active_requests, time.monotonic()),
            self.answers.shown,
        )
        self._batches = BatchRunner(self, self._metrics, log.event, lambda: self.is_draining)
        self.memory = DocumentMemory(
            self.store,
            self.files,
            lambda: self.models.embedder,
            lambda: self.models.reranker,
            log.event,
            lambda: self.is_draining,
            settings.threads,
        )

    async def wait_until_idle(self, seconds: float) -> bool:
        """Returns whether all requests of clients ended within `seconds`. Lines of batches run again after a restart."""
        return await self.active_requests.wait_until_idle(seconds)

    async def watch_loop(self) -> None:
        """Measures the lag of the event loop until it is cancelled."""
        await watch_lag(self._metrics.loop_lag.record, lambda: len(self.active_requests) > 0)

    async def run_batches(self) -> None:
        """Runs batches until it is cancelled."""
        await self._batches.run()

    def record_vectors(self, model: str, num_inputs: int, num_tokens: int, seconds: float) -> None:
        self._metrics.vectors(model, num_inputs, num_tokens, seconds)

    def wake_batches(self) -> None:
        self._batches.wake()

    async def text_of(self, tokens: Sequence[int]) -> str:
        return await self._preparer.text(list(tokens), ITSELF)

    async def close(self) -> None:
        """Ends the tasks and the worker processes, and closes the store."""
        await self.live.close()
        await self.tasks.close()
        await self.answers.flush()
        await self.learned.save()
        await self._bodies.close()
        await self._preparer.close()
        await self.memory.close()
        await self.models.close()
        await self.store.close()
        if self._traces is not None:
            self._traces.close()

    def asgi(self) -> ASGIApp:
        post, get = ["POST"], ["GET"]
        routes = [
            *(
                Route(path, partial(self._answer_requests.handle, one), methods=post)
                for path, one in self.formats.items()
            ),
            *(
                Route(one.counting.path, partial(self._count_tokens, one), methods=post)
                for one in self.formats.values()
                if one.counting is not None
            ),
            *(route for one in OTHER_ROUTES for route in one.routes(self)),
            Route("/tokenize", self._tokenize, methods=post),
            Route("/detokenize", self._detokenize, methods=post),
            Route("/tokenizer_info", self._tokenizer_info, methods=get),
            Route("/health", self._health, methods=get),
            Route("/ready", self._ready, methods=get),
            Route("/metrics", self._show_metrics, methods=get),
            Route("/version", self._version, methods=get),
            Route("/openapi.json", self._openapi, methods=get),
            Route("/docs", self._docs, methods=get),
        ]
        self._routes = routes
        handlers: dict[Any, Any] = {
            ApiError: self._respond_with_error,
            WeftError: self._respond_with_weft_error,
            HTTPException: _respond_with_http_error,
            Disconnected: _respond_to_disconnected,
            ClientDisconnect: _respond_to_disconnected,
            Exception: _respond_with_internal_error,
        }
        origins = list(self.settings.allowed_origins)
        middleware = []
        if origins:
            middleware = [
                Middleware(
                    CORSMiddleware,
                    allow_origins=origins,
                    allow_methods=["*"],
                    allow_headers=["*"],
                    expose_headers=_EXPOSED,
                )
            ]
        app = Starlette(routes=routes, exception_handlers=handlers, middleware=middleware)
        # A redirect has no body, and most clients do not repeat a POST after one. A 404 says what is wrong.
        app.router.redirect_slashes = False
        self._asgi = AccessLog(
            Guard(app, self.settings, self.formats),
            self._log,
            self.engine.new_id,
            self._metrics.failed,
            self._traces,
            self.formats,
        )
        return self._asgi

    def send_internal(
        self, path: str, body: bytes, request: InternalRequest
    ) -> Coroutine[Any, Any, InternalReply]:
        return send_internal(self._asgi, path, body, request)

    # ------------------------------------------------------------------ whether requests may begin

    def _check_open(self) -> None:
        """Raises a 503 while the engine is not ready or the server drains."""
        self.check_not_draining()
        if self.engine.state is not EngineState.READY:
            raise ApiError(503, "the engine is starting; try again", code="engine_not_ready")

    def check_not_draining(self) -> None:
        if self.is_draining:
            raise ApiError(
                503, "the server is shutting down; send the request to another server", code="draining"
            )

    def _retry_seconds(self) -> float:
        """Seconds after which a client that is refused now should retry."""
        if self.engine.state is not EngineState.READY:
            return self.engine.seconds_until_ready
        if self.is_draining:
            # Usually another server has replaced this one after the drain time, so it does not matter when this one has room.
            return self.settings.drain_seconds
        return self.active_requests.seconds_until_free()

    def check_model(self, name: str | None) -> None:
        self.models.check(name, "generate")

    def new_choices(self) -> Choices:
        return Choices(self.engine, self.text.tokenizer)

    # ------------------------------------------------------------------ everything else

    async def _tokenize(self, request: Request) -> Response:
        async def work(plain: PlainRequest[TokenizeRequest]) -> dict[str, Any]:
            self.models.check(plain.fields.model, self.models.main_use)
            self.active_requests.reserve(plain.active, plain.size // _BYTES_PER_TOKEN or 1)
            tokens = await self._preparer.tokens(plain.fields, plain.size, plain.client_id)
            plain.active.text_tokens = len(tokens)
            return {"count": len(tokens), "max_model_len": self.engine.max_sequence_length, "tokens": tokens}

        return await self.plain_requests.handle(request, TokenizeRequest, work)

    async def _detokenize(self, request: Request) -> Response:
        async def work(plain: PlainRequest[DetokenizeRequest]) -> dict[str, Any]:
            self.models.check(plain.fields.model, self.models.main_use)
            self.active_requests.reserve(plain.active, len(plain.fields.tokens))
            return {"prompt": await self._preparer.text(plain.fields.tokens, plain.client_id)}

        return await self.plain_requests.handle(request, DetokenizeRequest, work)

    async def _count_tokens(self, answer_format: AnswerFormat[Any], request: Request) -> Response:
        """Handles the route of an API format that counts prompt tokens. It prepares a request, and generates nothing."""
        counting = answer_format.counting
        assert counting is not None

        async def work(plain: PlainRequest[Any]) -> Any:
            active, fields = plain.active, plain.fields
            self.check_model(fields.model)
            self.active_requests.reserve(active, plain.size // _BYTES_PER_TOKEN or 1)
            with renamed_fields(answer_format.field_names(fields)):
                caller = Caller(self, active.key, active.id, plain.body_bytes)
                fields = await answer_format.load(fields, caller)
                parsed = await self._preparer.parse(answer_format, fields, plain.size, plain.client_id)
                if parsed.is_search_pending:
                    fields = await answer_format.search(fields, caller)
                    parsed = await self._preparer.parse(answer_format, fields, plain.size, plain.client_id)
                active.text_tokens = await self._preparer.count(parsed, plain.size, plain.client_id)
            return counting.answer(active.text_tokens)

        return await self.plain_requests.handle(request, counting.request_type, work)

    async def _tokenizer_info(self, request: Request) -> Response:
        """The same route as in vLLM. Clients that count tokens (lm-eval) call it before they load tokenizer files."""
        names = self.text.tokenizer.specials.names
        known = {name: names.get(name) for name in ("bos_token", "eos_token", "unk_token", "pad_token")}
        return json_response({**known, "vocab_size": self.text.tokenizer.vocabulary_size})

    async def _health(self, request: Request) -> Response:
        is_live = self.engine.state is EngineState.READY
        content = {"status": "ok" if is_live else "engine is down", **self._states()}
        return json_response(content, 200 if is_live else 503)

    async def _ready(self, request: Request) -> Response:
        self._check_open()
        if not self.engine.is_responding:
            message = "the engine does not respond; send requests to another server"
            raise ApiError(503, message, code="engine_not_responding")
        self.active_requests.check_capacity(request.scope[KEY], is_probe=True)
        return json_response({"status": "ready", **self._states()})

    def _states(self) -> dict[str, Any]:
        """The state of each engine, if there are several. Only the engine of MODEL decides the HTTP status: the server goes
        on without the others."""
        states = {name: engine.shown_state for name, _, engine in self.models.engines()}
        return {"models": states} if len(states) > 1 else {}

    async def _show_metrics(self, request: Request) -> Response:
        others = {name: engine for name, _, engine in self.models.engines() if engine is not self.engine}
        text = await self._metrics.text(self.engine, request.scope[KEY], others)
        return Response(text, media_type=CONTENT_TYPE)

    async def _version(self, request: Request) -> Response:
        return json_response({"version": __version__})

    @cached_property
    def _document(self) -> bytes:
        """The OpenAPI document. It is built at the first request for it, so that it does not delay the start of the server."""
        from weft.server.api import openapi

        return msgspec.json.encode(
            openapi.document(self._routes, self.formats, needs_key=bool(self.settings.api_keys))
        )

    async def _openapi(self, request: Request) -> Response:
        return Response(self._document, media_type="application/json")

    async def _docs(self, request: Request) -> Response:
        return docs_page.response()

    async def _respond_with_error(self, request: Request, error: ApiError) -> Response:
        if error.status in (429, 503) and error.retry_after is None:
            error.retry_after = self._retry_seconds()
        return error.response(request.scope)

    async def _respond_with_weft_error(self, request: Request, error: WeftError) -> Response:
        return await self._respond_with_error(request, as_api_error(error))


async def _respond_with_http_error(request: Request, error: HTTPException) -> Response:
    if error.status_code == 404:
        message = f"there is no route {request.url.path!r:.200}; /docs lists the routes"
    elif error.status_code == 405:
        message = f"{request.method} is not allowed for {request.url.path!r:.200}"
    else:
        message = error.detail
    return ApiError(error.status_code, message, headers=error.headers).response(request.scope)


async def _respond_to_disconnected(request: Request, error: Exception) -> Response:
    current_record().is_client_gone = True
    return Response(status_code=499)


async def _respond_with_internal_error(request: Request, error: Exception) -> Response:
    return ApiError.internal_error().response(request.scope)
